"""The only definition of the version of hstu_attn."""

__version__ = "0.1.0"
