"""The trained chain of tests/train, for the tests that ask it."""

from tests.train.conftest import drawn, phases

__all__ = ["drawn", "phases"]
