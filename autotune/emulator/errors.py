"""What the emulator raises when a kernel cannot be lowered, built or called."""


class EmulatorError(RuntimeError):
    """A kernel could not be lowered, built or started; the text says which and why.

    What a kernel does wrong while it runs is never raised: it is a finding of the report.
    """
