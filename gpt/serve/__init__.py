"""The HTTP server: an API in OpenAI's form in front of the engine, and a page. It needs the extra `serve`."""
