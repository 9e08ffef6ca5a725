"""Parts of frontends that do not depend on Triton, such as detokenization, stop strings, outputs, answers to
chat messages, checks of grammars, and stores for the result cache."""
