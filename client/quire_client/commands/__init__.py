"""Commands of `quire-client` (all but `completion`), each in the file of its name. Files whose names begin
with an underscore hold parts that several commands share."""

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
