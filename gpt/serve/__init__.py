"""The HTTP server: the engine behind an API in the OpenAI form, and a page. Needs the extra `serve`."""
