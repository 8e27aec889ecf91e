"""``ddtree-ops trust``: show a host's keys and remember them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli.command import Session, Targets, command
from ddtree_ops.errors import HostKeyError, UsageError
from ddtree_ops.model import HostSpec
from ddtree_ops.operate import by_host

if TYPE_CHECKING:
    from ddtree_ops.remote.trust import Offer, OfferedKey

SHOW = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"


def register(app: typer.Typer) -> None:
    @command(
        app,
        "trust",
        examples=[
            "ddtree-ops trust ct200",
            "ddtree-ops trust ct200 --fingerprint SHA256:kX3...   # as read on the host's own console",
            "ddtree-ops trust ct200 --replace                      # after it was installed anew",
        ],
    )
    def trust(
        session: Session,
        targets: Targets,
        yes: Annotated[bool, typer.Option("--yes", "-y", help="Trust what is shown without asking.")] = False,
        fingerprint: Annotated[
            str | None,
            typer.Option("--fingerprint", metavar="SHA256:...", help="Trust the key with this fingerprint, no other."),
        ] = None,
        replace: Annotated[bool, typer.Option("--replace", help="Forget the keys that were known for it.")] = False,
    ) -> None:
        """Show the SSH keys of a host (and of its jump hosts) and remember them in known_hosts."""
        from ddtree_ops.remote.trust import learn

        hosts = [host for host, _ in by_host(session.select(targets).targets) if host.transport == "ssh"]
        if not hosts:
            raise UsageError("this machine itself is no SSH host; there is no key to trust")
        if fingerprint is not None and len(hosts) > 1:
            raise UsageError("--fingerprint is that of one host", next=f"ddtree-ops trust {hosts[0].name}")
        written: list[str] = []

        def decide(host: HostSpec, offer: Offer) -> Sequence[OfferedKey]:
            chosen = choose(session, offer, yes=yes, fingerprint=fingerprint, host=host.name)
            written.extend(key.fingerprint for key in chosen)
            return chosen

        offers = {host.name: learn(host, partial(decide, host), replace=replace) for host in hosts}
        report(session, offers, written)


def choose(session: Session, offer: Offer, *, yes: bool, fingerprint: str | None, host: str) -> Sequence[OfferedKey]:
    """The keys to trust: the one named, else those the person (or ``--yes``) agrees to."""
    if fingerprint is not None:
        named = [key for key in offer.keys if key.fingerprint == fingerprint]
        if not named:
            shown = ", ".join(f"{key.type} {key.fingerprint}" for key in offer.keys)
            raise HostKeyError(
                f"{offer.hop} has no key {fingerprint}; it shows {shown}", host,
                "another machine may answer in its place", f"on the host: {SHOW}",
            )  # fmt: skip
        return named
    if yes:
        return offer.unknown
    if session.json or not sys.stdin.isatty():
        raise UsageError(
            "there is nobody to ask whether these keys are the right ones", host, "a key is never trusted silently",
            f"ddtree-ops trust {host} --fingerprint {offer.unknown[0].fingerprint}",
        )  # fmt: skip
    session.out.line(f"{offer.hop} shows:")
    for key in offer.unknown:
        session.out.line(f"  {key.type}  {key.fingerprint}  {key.state}")
    session.out.line(f"Compare with the host's own console: {SHOW}")
    return offer.unknown if typer.confirm("Trust them?", default=False) else ()


def report(session: Session, offers: Mapping[str, Sequence[Offer]], written: Sequence[str]) -> None:
    rows = [
        {
            "host": host,
            "machine": str(offer.hop),
            "name": offer.hop.key_name,
            "file": str(offer.file),
            "type": key.type,
            "fingerprint": key.fingerprint,
            "state": "trusted" if key.fingerprint in written else key.state,
        }
        for host, each in offers.items()
        for offer in each
        for key in offer.keys
    ]
    if session.json:
        session.out.data({"keys": rows})
        return
    session.out.table(
        ("HOST", "MACHINE", "KEY", "FINGERPRINT", "STATE", "FILE"),
        [(row["host"], row["machine"], row["type"], row["fingerprint"], row["state"], row["file"]) for row in rows],
    )
