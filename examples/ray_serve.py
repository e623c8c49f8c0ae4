"""Serves a model with Ray Serve: each replica has the routes of `jaxembed serve`.

    pip install "jaxembed[ray]" "ray[serve]"
    serve run ray_serve:build model=sentence-transformers/all-MiniLM-L6-v2 gpus=1

The server listens on port 8000: POST /v1/embeddings, /embed, /rerank...
"""

from ray import serve
from ray.serve import Application

from jaxembed import Embedder
from jaxembed.config import ServerConfig
from jaxembed.server.app import Server, create_app
from jaxembed.server.models import Models

# Requests that a replica is given at once. The server batches them itself, and refuses with 429
# what it has no room for. Ray's own limit of 5 would leave the device idle.
MAX_AT_ONCE = 1024
# Requests at once for which a replica is added. The default of 2 adds one for any load. As many as
# are answered in the time a request may take: at 1,000 a second and 0.25 s, 250.
TARGET_AT_ONCE = 256
CLOSE_S = 5.0


@serve.deployment(max_ongoing_requests=MAX_AT_ONCE)
@serve.ingress()
class Jaxembed:
    """One replica: a model and the server's app."""

    def __init__(self, model: str | None = None):
        self.models = Models([Embedder(model)])

    def __serve_build_asgi_app__(self) -> Server:
        return create_app(self.models, ServerConfig())

    def __del__(self) -> None:
        if hasattr(self, "models"):  # or the model could not be loaded
            self.models.close(CLOSE_S)


def build(arguments: dict[str, str]) -> Application:
    """The application for `serve run`: `model`, `gpus` of a replica, and `replicas` at most."""
    deployment = Jaxembed.options(
        ray_actor_options={"num_gpus": float(arguments.get("gpus", 0))},
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": int(arguments.get("replicas", 1)),
            "target_ongoing_requests": TARGET_AT_ONCE,
        },
    )
    return deployment.bind(arguments.get("model"))
