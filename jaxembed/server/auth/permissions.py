"""Checks what the API key of the current request may use."""

from collections.abc import Collection

from jaxembed.engine.quota import Account, Quota, Refusal
from jaxembed.errors import Forbidden
from jaxembed.server.auth.keyring import ApiKey, some_of
from jaxembed.server.http.exchange import current_exchange
from jaxembed.server.registry.models import UNSPECIFIED

LONGEST_NAME = 200  # maximum characters of a name in a message or the audit log
MAX_LISTED_NAMES = 20  # maximum names in a message


def open_account(quota: Quota | None) -> None:
    """Start counting the inputs and tokens of the current request, for the audit log and the quota
    of its API key, if any."""
    current_exchange().body.reservation.account = Account(quota)


def note_model(name: str) -> None:
    """Make the audit log name a model that the current request loads, unloads or gives an alias,
    and so does not run."""
    account = current_exchange().body.reservation.account
    if account is not None:
        account.models.add(name[:LONGEST_NAME])


def use_key(key: ApiKey, quota: Quota, method: str, path: str) -> None:
    """Count a request in the quota of its key if it is a POST. Raises Forbidden if the key may not
    use the route, and QuotaExceeded."""
    if not key.may_use_route(path):
        what = f"may not use {path[:LONGEST_NAME]}"
        raise refusal("route", what, key.routes or (), key.name, quota)
    if method == "POST":
        quota.count_request()


def check_name(name: str | None) -> Collection[str] | None:
    """Return the names of the models that the request's key may use; None means all.

    `name` is the model that the request names, if any. Raises Forbidden if the key may not use that
    name, whether or not the server has such a model.
    """
    key: ApiKey | None = current_exchange().key
    if key is None or key.models is None:
        return None
    if name and name != UNSPECIFIED and name not in key.models:
        what = f"may not use the model `{name[:LONGEST_NAME]}`"
        raise refusal("model", what, key.models, key.name, current_exchange().quota)
    return key.models


def refusal(
    reason: Refusal, what: str, allowed: Collection[str], name: str, quota: Quota
) -> Forbidden:
    """Count a refusal in the quota of the key `name`, and return the error to raise. The message
    says `what` the key may not do and what it is `allowed` to use."""
    quota.refuse(reason)
    return Forbidden(f"the key `{name}` {what}; it may use {some_of(allowed, MAX_LISTED_NAMES)}")
