"""An OpenAI-compatible HTTP front of a Quire (or any KServe) server: `quire-client openai`.

The package needs the extra `openai` (starlette, uvicorn, httpx, prometheus-client). So nothing outside it
imports it at load time.
"""
