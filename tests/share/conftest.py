"""The browser of the tests of the page."""

from tests.browser import start

__all__ = ["start"]
