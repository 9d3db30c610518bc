"""Formats that people's logs are in: one file each, all behind `Importer`."""

from autospec.traffic.importers.base import BrokenEntryError, ImportedRequest, Importer
from autospec.traffic.importers.detect import IMPORTERS, detect, importer_named

__all__ = ["IMPORTERS", "BrokenEntryError", "ImportedRequest", "Importer", "detect", "importer_named"]
