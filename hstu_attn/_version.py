"""The version of hstu_attn: this line is the only place that has it."""

__version__ = "0.1.0"
