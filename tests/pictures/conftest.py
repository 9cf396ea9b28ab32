from tests.data.conftest import rows, texts  # noqa: F401 - fixtures
