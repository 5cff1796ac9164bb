"""Errors that a person can act on: one line that names the file or key and the remedy, and one exit code a kind.

Anything else that escapes is a bug and shows its traceback. The codes are part of the interface (README, "Exit
codes"): SLURM wrappers and CI tell a full disk from a typing error by them.
"""


class WcpipeError(Exception):
    """Base of every error that wcpipe reports in one line on stderr; `exit_code` is the process's exit status."""

    exit_code = 1


class UsageError(WcpipeError):
    """A command was called with arguments that do not fit together."""

    exit_code = 2


class ConfigError(WcpipeError):
    """params.yaml (or another configuration file) has an unknown key or a bad value."""

    exit_code = 3


class WordError(WcpipeError):
    """An action word, a pose file or a label is malformed or does not fit the clip."""

    exit_code = 4


class DataError(WcpipeError):
    """A store or file is missing, corrupt, or belongs to other inputs."""

    exit_code = 5


class CheckpointError(WcpipeError):
    """Weights or an optimizer state are missing, truncated or of another shape."""

    exit_code = 6


class StorageError(WcpipeError):
    """The disk is full or not writable; what was finished before stays valid."""

    exit_code = 7


class NumericsError(WcpipeError):
    """A loss or a sample is not finite; the last complete checkpoint is untouched."""

    exit_code = 8


class MissingScoresError(WcpipeError):
    """Scores are missing beyond what the parameters allow; a re-run scores only those."""

    exit_code = 9


class DependencyError(WcpipeError):
    """An optional package or service is not installed; the message says how to get it."""

    exit_code = 10


class ScorerUnavailable(DependencyError):
    """A scorer's environment or worker process cannot be used at all: no fault of any clip, so the stage stops."""


class ClusterError(WcpipeError):
    """SLURM refused a job, does not answer, or a task failed for good."""

    exit_code = 11


class Interrupted(WcpipeError):
    """A signal asked to stop; the stage ended at an item's end and can be resumed (EX_TEMPFAIL)."""

    exit_code = 75
