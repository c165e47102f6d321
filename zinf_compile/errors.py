"""The failures a user can meet, one class each; every message names what was asked, what is possible and what to change."""


class ZinfError(Exception):
    """Base of every error raised on purpose by zinf_compile."""


class BudgetTooSmall(ZinfError, ValueError):
    """No schedule keeps the step under the budget.

    Attributes:
        minimum: the smallest budget, in bytes, that would be accepted. Asking for exactly that works.
        culprit: the operation and the tensors that set the minimum.
    """

    def __init__(self, message: str, minimum: int, culprit: str) -> None:
        super().__init__(message)
        self.minimum = minimum
        self.culprit = culprit


class StoreError(ZinfError, OSError):
    """The disk store cannot be created, read or written. The message names the path, the bytes needed and the bytes free."""


class PlanMismatch(ZinfError, ValueError):
    """A plan does not belong to this model or is not safe; the message names the first difference or the invariant broken."""


class ClusterError(ZinfError, ValueError):
    """A cluster description is malformed; the message names the file and the key."""


class Unsupported(ZinfError, RuntimeError):
    """A construct that cannot be honoured; the message names it and the way out."""
