"""An OpenAI-compatible HTTP front of a Quire server: `quire-client openai`.

The package needs the extra `openai` (starlette, uvicorn, httpx, prometheus-client). So nothing outside it
imports it at load time.
"""
