"""Settings of the HTTP front door. Validators check and never change a value."""

from pydantic import Field

from actors.settings import Settings


class ServiceSettings(Settings):
    """Where the service listens, and the bounds of one request."""

    host: str = "127.0.0.1"
    """Address to listen on. On another one than this machine's own, ``token_file`` or
    ``allow_anonymous`` is required."""
    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port to listen on."""
    token_file: str | None = None
    """File with a token per line, on the node of the HTTP replica. Clients have to send one of
    them as ``Authorization: Bearer``; only health and metrics are open. Without it, everybody
    who reaches the port is served."""
    allow_anonymous: bool = False
    """Serve other machines without tokens: for where a network policy or a proxy decides who
    reaches the port."""
    max_request_bytes: int = Field(default=64 << 20, ge=1024)
    """Largest request body; a larger one is answered with 413."""
    max_prompts: int = Field(default=8192, ge=1)
    """Most prompts of one rollout."""
    max_samples_per_rollout: int = Field(default=32768, ge=1)
    """Most samples (prompts times n) of one rollout."""
    max_open_requests: int = Field(default=4096, ge=1)
    """Most requests that are answered at the same time; more wait or are answered with 503."""
    poll_wait_s: float = Field(default=5.0, gt=0, le=60)
    """Bound of one wait for finished samples; then the service asks again."""
    poll_limit: int = Field(default=256, ge=1)
    """Most finished samples that are fetched at once, and most in one page of an answer."""
    max_wait_s: float = Field(default=86400, gt=0)
    """Longest time that one request follows a rollout; then it is answered with 503, and the
    rollout can still be asked for by its id."""
    abort_timeout_s: float = Field(default=30, gt=0)
    """Bound on the abort of a rollout whose client has gone."""
