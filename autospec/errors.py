"""What autospec raises: one root, few children. A message names the value, what is allowed, and what to do."""


class AutospecError(Exception):
    """Root of every error that autospec raises on purpose."""


class ConfigurationError(AutospecError, ValueError):
    """An option is unknown, out of range, or contradicts another one."""


class DraftError(AutospecError):
    """A draft source cannot work with this target (another vocabulary, device, damaged state)."""


class StoreError(AutospecError):
    """The telemetry database cannot be used: unwritable, of another application, or of a newer version."""


class ModelError(AutospecError):
    """A model or tokenizer cannot be found, checked or loaded."""


class ExactnessError(AutospecError):
    """An internal contract was broken. The request is stopped: a wrong distribution is never returned."""
