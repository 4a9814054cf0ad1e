"""One base class for every error that prefixonce raises on purpose."""


class PrefixOnceError(Exception):
    """A refusal or a broken promise; its text is one line: what was given, what is allowed, what to do."""


class UnsupportedError(PrefixOnceError):
    """A shape, dtype, feature or version that prefixonce does not serve."""


class LayoutError(PrefixOnceError):
    """Slots, runs or segments that contradict each other."""
