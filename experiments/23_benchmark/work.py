"""What is done, one JSON line each, so that a run that was cut short goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Work:
    """Rows in memory and in a file.

    Raises:
        SystemExit: the file holds rows of other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.settings = json.loads(json.dumps(settings))
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut short by the end of that run
            if row["phase"] != "settings":
                self.rows.append(row)
            elif row["settings"] != self.settings:
                changed = sorted(key for key in self.settings if self.settings[key] != row["settings"].get(key))
                raise SystemExit(f"{path} has rows with other {', '.join(changed)}: delete it, or name another --work")
        if not path.exists():
            self._write({"phase": "settings", "settings": self.settings})

    def add(self, phase: str, **row: Any) -> None:
        self.rows.append({"phase": phase, **row})
        self._write(self.rows[-1])

    def of(self, phase: str, **wanted: Any) -> list[dict[str, Any]]:
        """Rows with these values; those that are errors are left out, so that they are tried again."""
        return [
            row
            for row in self.rows
            if row["phase"] == phase and "error" not in row and all(row.get(k) == v for k, v in wanted.items())
        ]

    def errors(self, phase: str, **wanted: Any) -> list[dict[str, Any]]:
        return [
            row
            for row in self.rows
            if row["phase"] == phase and "error" in row and all(row.get(k) == v for k, v in wanted.items())
        ]

    def _write(self, row: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(row) + "\n")  # the line before may have been cut short
