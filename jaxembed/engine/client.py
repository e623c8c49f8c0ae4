"""What engines a loaded model may have: one with a queue, to which requests are submitted, or one
that computes in the thread which asks."""

from jaxembed.engine.engine import Engine
from jaxembed.engine.host import HostEngine

EngineClient = Engine
ServedEngine = Engine | HostEngine
