"""Takes the README's pictures of the dashboard, from a database that `autospec demo` wrote.

python tests/readme_pictures.py [--store sqlite:///autospec-demo.db] [--segment code_edit] [--out docs/images]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from urllib.parse import urlencode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browsing import HAS_BROWSER, window  # noqa: E402
from tests.dashboard_stores import served  # noqa: E402

WIDTH = 1_280
HEIGHTS = {"overview": 960, "segment": 1_620}
MOST_BYTES = 320_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="sqlite:///autospec-demo.db")
    parser.add_argument("--segment", default="code_edit")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    if not HAS_BROWSER:
        raise SystemExit("no Chromium with its driver here: make browser installs it")
    options.out.mkdir(parents=True, exist_ok=True)
    paths = {"overview": "", "segment": f"segment?{urlencode({'segment': options.segment})}"}
    with served(options.store) as address, window() as browser:
        browser.dark(False)
        for name, path in paths.items():
            browser.resize(WIDTH, HEIGHTS[name])
            browser.open(address + path)
            browser.until_drawn()
            picture = browser.picture(whole=False)
            if len(picture) > MOST_BYTES:
                raise SystemExit(f"the picture of the {name} has {len(picture):,} bytes, more than {MOST_BYTES:,}")
            file = options.out / f"dashboard-{name}.png"
            file.write_bytes(picture)
            print(f"{file}: {len(picture):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
