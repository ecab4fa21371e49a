"""zero2all: from raw text to a language model of your own.

Nothing heavy is imported here: `z2a --help` must answer at once, and a stage must not pay for its neighbours.
"""

__version__ = "0.1.0"
