"""The dead-man switch: a release that nobody confirms in time is taken back by the host itself.

``arm`` comes before the switch to a new release, ``confirm`` after its gates. In between the host holds two things:

- a transient timer (systemd-run, so no daemon-reload, which can cut containers off their GPUs) that runs ``expire``
  when the time is over;
- a unit that is enabled once and runs at boot: a transient timer does not outlive a reboot, ``armed.json`` does.

Both count by the clock that nobody sets; across a boot only the wall clock is left.

``armed.json`` alone decides. It appears after the timer and goes before it, so a timer without it does nothing, and
arming again (a client that is alive moves its deadline ahead) leaves no gap between two timers.
"""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any

from . import files, lock, staging, state, take_back, units
from .context import Context, Failure, Op

BOOT_UNIT = "ddtree-takeback.service"
# Other changes may hold the lock when the deadline comes; the timer's service tries again until they are done.
RETRY_S = 15


def arm(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance, to: DIGEST | "none", within_s} -> {deadline, to}: take back to ``to`` unless confirmed in time.

    Arming again moves the deadline. What would be returned to stays what it was: the release in between is not proven.
    """
    instance, within = args["instance"], math.ceil(float(args["within_s"]))
    before = read(ctx, instance)
    to = before["to"] if before else args["to"]
    if to != take_back.NONE:
        wrong = staging.damage(ctx.release_dir(instance, to))
        if wrong:
            raise Failure(
                "RefusedError", "release {} could not be returned to: {}".format(to[:12], "; ".join(wrong[:5])),
                "a switch that has no way back is not armed", f"ddtree-ops deploy {{host}}:{instance}",
            )  # fmt: skip
    install_boot_unit(ctx)
    deadline = math.ceil(time.time() + within)
    armed = {
        "to": to,
        "since": before["since"] if before else time.time(),
        "within": within,
        **due_in(within),
        "deadline": deadline,
        "token": ctx.lock,
        "invocation": before["invocation"] if before else units.shown(ctx, instance).get("InvocationID"),
        "timer": start_timer(ctx, instance, within),
    }
    folder = ctx.instance_dir(instance)
    files.make_dirs(folder)
    files.write_json(os.path.join(folder, "armed.json"), armed, 0o600)
    if before:
        stop_timer(ctx, before)
    else:
        state.remember(ctx, instance, "armed", to=to, deadline=deadline)
    return {"deadline": deadline, "to": to}


def confirm(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance} -> {was_armed}: the release stays (or is already taken back by the client)."""
    instance = args["instance"]
    armed = read(ctx, instance)
    if armed is None:
        return {"was_armed": False}
    put_away(ctx, instance, armed)
    state.remember(ctx, instance, "disarmed", release=state.current(ctx, instance))
    return {"was_armed": True}


def expire(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance} -> {taken_back, ...}: what the timer runs. Before the deadline, and unarmed, it does nothing."""
    with lock.alone(ctx):  # what the client has begun is over before we look: a confirmation, a later deadline
        armed = read(ctx, args["instance"])
        if armed is None:
            return {"taken_back": False, "why": "not armed"}
        if left_s(armed) > 0:
            return {"taken_back": False, "why": "not due"}
        return take_it_back(ctx, args["instance"], armed)


def take_it_back(ctx: Context, instance: str, armed: dict[str, Any]) -> dict[str, Any]:
    """What is due: in the place of the client that armed it, or when whoever else changes the host is done."""
    token = lock.seize(ctx, armed.get("token"), "dead-man switch", f"taking back {instance}")
    try:
        waited = armed["deadline"] - armed["since"]
        reason = f"nobody confirmed it within {waited:.0f} s; the host took it back by itself"
        done = take_back.take_back(
            ctx,
            {
                "instance": instance,
                "to": armed["to"],
                "reason": reason,
                "invocation": armed.get("invocation"),
                "details": {"by": "dead-man switch"},
            },
        )
        lock.say_seized(
            ctx, armed.get("token"), f"{instance} was not confirmed in time; the host took it back by itself"
        )
        put_away(ctx, instance, armed)
        lock.audit(ctx, "taken-back-by-host", instance=instance, was=done["was"], to=done["to"], reason=reason)
    finally:
        lock.unlock(ctx, {"token": token})
    return dict(done, taken_back=True)


def at_boot(ctx: Context, _args: dict[str, Any]) -> dict[str, Any]:
    """{} -> {instances: {name: what was done}}: take back what is due, and wait again for what is not."""
    done: dict[str, Any] = {}
    wrong: list[str] = []
    for instance in ctx.instances():
        try:
            if read(ctx, instance) is not None:
                done[instance] = take_up(ctx, instance)
        except (Failure, OSError) as error:  # the others are not less due
            files.ask_again_on_full_disk(error, ctx.root)
            wrong.append(f"{instance}: {error}")
    if wrong:
        raise Failure("NotRolledBackError", "; ".join(wrong), "the host tries again", "ddtree-ops status {host}")
    return {"instances": done}


def take_up(ctx: Context, instance: str) -> dict[str, Any]:
    """One armed switch after a boot, whose timer is gone. What cannot be taken back yet is tried again by a new one."""
    try:
        done = expire(ctx, {"instance": instance})
    except (Failure, OSError) as error:
        files.ask_again_on_full_disk(error, ctx.root)
        done = {"taken_back": False, "why": str(error)}
    with lock.alone(ctx):
        armed = read(ctx, instance)
        if armed is not None and armed.get("boot") != lock.boot_id():  # one of this boot has a timer that runs
            again = max(RETRY_S, math.ceil(left_s(armed)))
            armed.update(due_in(again), timer=start_timer(ctx, instance, again))
            files.write_json(os.path.join(ctx.instance_dir(instance), "armed.json"), armed, 0o600)
    return done


def due_in(seconds: float) -> dict[str, Any]:
    """The deadline by the clock that nobody sets. It ends with the boot, so ``deadline`` has the wall clock's too."""
    return {"boot": lock.boot_id(), "until": time.monotonic() + seconds}


def left_s(armed: dict[str, Any]) -> float:
    """Seconds until it is due. After a reboot the wall clock tells, wrong by no more than the time that was given."""
    if armed.get("boot") == lock.boot_id():
        return float(armed["until"]) - time.monotonic()
    return min(float(armed["deadline"]) - time.time(), float(armed.get("within", math.inf)))


def read(ctx: Context, instance: str) -> dict[str, Any] | None:
    armed = files.read_json(os.path.join(ctx.instance_dir(instance), "armed.json"))
    return armed if isinstance(armed, dict) else None


def public(armed: dict[str, Any] | None) -> dict[str, Any] | None:
    """As anybody may see it: the token is that of the host's lock."""
    return {k: v for k, v in armed.items() if k != "token"} if armed else None


def put_away(ctx: Context, instance: str, armed: dict[str, Any]) -> None:
    files.remove_link(os.path.join(ctx.instance_dir(instance), "armed.json"))
    stop_timer(ctx, armed)


def start_timer(ctx: Context, instance: str, seconds: int) -> str:
    """A timer of its own name each time: the one before goes on until this one runs."""
    name = f"ddtree-takeback-{instance}-{os.urandom(4).hex()}"
    request = os.path.join(ctx.instance_dir(instance), "expire.json")
    files.make_dirs(os.path.dirname(request))
    write_request(ctx, request, "expire", {"instance": instance})
    ran = ctx.run(
        "systemd-run", "--quiet", "--unit=" + name, "--description=Take back an unconfirmed release of " + instance,
        f"--on-active={seconds}", "--timer-property=AccuracySec=1s",
        "--property=Restart=on-failure", f"--property=RestartSec={RETRY_S}",
        *(word.replace("$", "$$") for word in (sys.executable, "-I", ctx.path("takeback.pyz"), request)),
    )  # fmt: skip
    if ran.rc != 0:
        raise Failure(
            "RefusedError", "the dead-man switch could not be armed: %s" % (ran.err.strip() or ran.out.strip()),
            "without it a release stays when this machine is lost in the middle of a change",
            "ddtree-ops doctor {host}", ran=ran.raw(),
        )  # fmt: skip
    return name


def stop_timer(ctx: Context, armed: dict[str, Any]) -> None:
    """The timer only: when its service runs this very line, it must not end itself."""
    ctx.run("systemctl", "stop", "{}.timer".format(armed["timer"]))


def write_request(ctx: Context, path: str, op: str, args: dict[str, Any]) -> None:
    request = {
        "op": op, "args": args, "root": ctx.root, "scope": ctx.scope, "host": ctx.host,
        "unit_dir": ctx.unit_dir, "bin": ctx.bin, "deadline_s": 240,
    }  # fmt: skip
    files.write_json(path, request)


def install_boot_unit(ctx: Context) -> None:
    """The helper under a name that stays, and the unit that runs it at boot; systemd reads it when it boots."""
    place = ctx.path("takeback.pyz")
    if sys.argv[0].endswith(".pyz") and os.path.abspath(sys.argv[0]) != place:
        helper = staging.read(sys.argv[0])
        if not os.path.isfile(place) or staging.read(place) != helper:
            files.write_file(place, helper)
    write_request(ctx, ctx.path("at_boot.json"), "at_boot", {})
    wants = "multi-user.target.wants" if ctx.scope == "system" else "default.target.wants"
    unit, link = os.path.join(ctx.unit_dir, BOOT_UNIT), os.path.join(ctx.unit_dir, wants, BOOT_UNIT)
    files.make_dirs(os.path.dirname(link))
    text = boot_unit(ctx).encode()
    if not os.path.isfile(unit) or staging.read(unit) != text:
        files.write_file(unit, text)
    if not os.path.islink(link):
        files.point(link, unit)


def boot_unit(ctx: Context) -> str:
    words = (sys.executable, "-I", ctx.path("takeback.pyz"), ctx.path("at_boot.json"))
    target = "multi-user.target" if ctx.scope == "system" else "default.target"
    return "\n".join(
        [
            "[Unit]",
            "Description=Take back releases that nobody confirmed before the host went down",
            "RequiresMountsFor=" + quote(ctx.root, "%"),
            "ConditionPathExistsGlob={}/instances/*/armed.json".format(ctx.root.replace("%", "%%")),
            "",
            "[Service]",
            "Type=exec",
            "Restart=on-failure",
            f"RestartSec={RETRY_S}",
            "ExecStart=" + " ".join(map(quote, words)),
            "",
            "[Install]",
            "WantedBy=" + target,
            "",
        ]
    )


def quote(word: str, doubled: str = "%$") -> str:
    """One word of ExecStart: neither specifiers nor variables nor quotes of its own. Elsewhere ``$`` means nothing."""
    word = word.replace("\\", "\\\\").replace('"', '\\"')
    for sign in doubled:
        word = word.replace(sign, 2 * sign)
    return f'"{word}"'


OPS: dict[str, Op] = {"arm": arm, "confirm": confirm, "disarm": confirm, "expire": expire, "at_boot": at_boot}
