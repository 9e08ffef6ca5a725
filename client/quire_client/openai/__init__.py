"""An OpenAI-compatible HTTP front of a Quire (or any KServe) server: `quire-client openai`.

Needs the extra `openai` (starlette, uvicorn, httpx), so nothing outside this package imports it at load time.
"""
