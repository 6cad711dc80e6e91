"""``persia doctor --stack``: the containers of the stack, their ranks, and the connections from inside each one."""

from collections.abc import Iterable, Iterator, Sequence

from persia.doctor import containers
from persia.doctor.check import Check
from persia.doctor.containers import Container, Inside, Reached
from persia.runtime.errors import UnreachableError
from persia.runtime.exit_codes import ExitCode

_MASTER = ("MASTER_ADDR", "MASTER_PORT")


def checks() -> Iterator[Check]:
    """Yield the checks of the stack in this folder."""
    try:
        there = containers.containers()
    except UnreachableError as error:
        hint = error.hint or "run this in the folder of docker-compose.yaml"
        yield Check("stack", "fail", str(error), "", hint, ExitCode.UNREACHABLE)
        return
    yield states(there)
    found = containers.inside(there, containers.peers(there))
    for each in found:
        if each.problem:
            name = each.container.name
            remedy = f"see its last lines: persia logs --service {name} --tail 50; its state: docker compose ps --all"
            yield Check("inside", "fail", f"{name}: {each.problem}", "", remedy, ExitCode.UNREACHABLE)
    yield from ranks(found, there)
    yield from replicas(found)
    yield from connections([each for each in found if not each.problem])


def states(there: Sequence[Container]) -> Check:
    """Check that no container is unhealthy, or has ended with an exit code other than 0."""
    wide = max((len(each.name) for each in there), default=0)
    places = {each.name: " ".join(each.addresses) or "-" for each in there}
    lines = [f"{each.name:<{wide}}  {places[each.name]:<15}  {each.state}{_restarts(each)}" for each in there]
    lines += [f"{each.name}: {each.health}, last health check: {each.last_check}" for each in there if each.last_check]
    bad = [each for each in there if (each.status != "running" and each.exit_code) or each.health == "unhealthy"]
    if not bad:
        return Check("containers", "ok", "\n".join(lines))
    names = ", ".join(each.name for each in bad)
    why = f"unhealthy, or ended with an error: {names}"
    remedy = f"persia logs --service {bad[0].name} --tail 50; without restarts: PERSIA_RESTART=no"
    return Check("containers", "fail", "\n".join(lines), why, remedy, ExitCode.UNREACHABLE)


def _restarts(container: Container) -> str:
    return f", restarts: {container.restarts}" if container.restarts else ""


def ranks(found: Sequence[Inside], there: Sequence[Container]) -> Iterator[Check]:
    """Yield a check of ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` of trainers.

    Missing and duplicate ranks are marked.

    Args:
        found: The results of the probe inside the running containers.
        there: All containers.
    """
    rows = {
        (each.container.name, int(own["RANK"])): own
        for each in found
        for own in each.variables
        if own.get("RANK", "").isdecimal()
    }
    if not rows:
        trainers = [each for each in there if each.service == "trainer"]
        said = ", ".join(f"{each.name} {each.state}" for each in trainers) or "the stack has no trainer"
        yield Check("ranks", "skip", "no rank runs", said)
        return
    sizes = sorted({own.get("WORLD_SIZE", "") for own in rows.values()})
    size = max((int(each) for each in sizes if each.isdecimal()), default=1)
    counts = {rank: [name for name, other in rows if other == rank] for _, rank in rows}
    lines = []
    for (name, rank), own in sorted(rows.items(), key=lambda row: (row[0][1], row[0][0])):
        master = ":".join(own.get(each, "") for each in _MASTER).strip(":") or "by NATS"
        mark = "  DUPLICATE" if len(counts[rank]) > 1 else "" if rank < size else "  NOT BELOW WORLD_SIZE"
        lines.append(f"{name}  RANK={rank} WORLD_SIZE={own.get('WORLD_SIZE', '-')} MASTER={master}{mark}")
    missing = [rank for rank in range(size) if rank not in counts]
    lines += [f"MISSING  RANK={rank}" for rank in missing]
    whys = [f"rank {rank} runs in {', '.join(names)}" for rank, names in sorted(counts.items()) if len(names) > 1]
    whys += [f"no container has rank {', '.join(map(str, missing))}"] if missing else []
    whys += [f"WORLD_SIZE differs: {', '.join(each or 'not set' for each in sizes)}"] if len(sizes) > 1 else []
    masters = {tuple(own.get(each, "") for each in _MASTER) for own in rows.values()}
    whys += ["MASTER_ADDR and MASTER_PORT differ"] if len(masters) > 1 else []
    if not whys:
        yield Check("ranks", "ok", "\n".join(lines))
        return
    remedy = "persia-launcher numbers the ranks by REPLICA_INDEX, REPLICA_SIZE and GPU_NUM: set TRAINER_REPLICA and "
    remedy += "GPU_NUM in .env, and no RANK; see which container has ended: docker compose ps --all trainer"
    yield Check("ranks", "fail", "\n".join(lines), "; ".join(whys), remedy, ExitCode.UNREACHABLE)


def replicas(found: Sequence[Inside]) -> Iterator[Check]:
    """Yield a check for each service in which a replica index occurs twice or is missing."""
    for service in ("emb_server", "data_compose"):
        numbers: dict[int, set[str]] = {}
        sizes: set[int] = set()
        for each in found:
            for own in each.variables if each.container.service == service else ():
                if own.get("REPLICA_INDEX", "").isdecimal() and own.get("REPLICA_SIZE", "1").isdecimal():
                    numbers.setdefault(int(own["REPLICA_INDEX"]), set()).add(each.container.name)
                    sizes.add(int(own.get("REPLICA_SIZE", "1")))
        shared = {index: sorted(names) for index, names in sorted(numbers.items()) if len(names) > 1}
        double = [f"{index} in {', '.join(names)}" for index, names in shared.items()]
        missing = [str(index) for index in range(max(sizes, default=0)) if index not in numbers]
        if double or missing:
            parts = [f"twice: {', '.join(double)}"] if double else []
            parts += [f"missing: {', '.join(missing)}"] if missing else []
            text = f"{service}: REPLICA_INDEX {'; '.join(parts)}"
            yield Check("replicas", "fail", text, "", f"docker compose ps --all {service}", ExitCode.UNREACHABLE)


def connections(found: Sequence[Inside]) -> Iterator[Check]:
    """Yield a check with the table of all connections, one of name resolution, and one for each failed connection.

    Args:
        found: The results of the probe inside each container.
    """
    if not any(each.reached for each in found):
        yield Check("connections", "skip", "not checked", "no running container has a peer that could be probed")
        return
    failed = [(each.container, one) for each in found for one in each.reached if one.outcome != "reached"]
    count = sum(len(each.reached) for each in found)
    said = f"{len(failed)} of {count} connections fail" if failed else f"all {count} connections are open"
    why, shown = "DNS and TCP from inside each container; times are round trips", "\n".join([said, *_table(found)])
    yield Check("connections", "fail" if failed else "ok", shown, why, "", ExitCode.UNREACHABLE)
    names = {one.peer.host: one.by for each in found for one in each.reached if one.by != "-"}
    if names:
        by = {source: [host for host, other in names.items() if other == source] for source in names.values()}
        listed = "; ".join(f"{source}: {', '.join(sorted(hosts))}" for source, hosts in sorted(by.items()))
        yield Check("names", "ok", listed, "/etc/hosts has the extra_hosts of compose; Docker's DNS is 127.0.0.11")
    for container, one in failed:
        yield _failure(container, one)


def _failure(container: Container, one: Reached) -> Check:
    place = f"{container.name} -> {one.peer.name}:{one.peer.port}"
    if one.outcome == "unresolved":
        found, why = f"DNS failed: {place}", f"the name {one.peer.host} has no address in {container.name}"
        command = f"docker compose exec {container.service} getent hosts {one.peer.host}"
        remedy = f"{command}; check that both services share a network"
    elif one.outcome == "refused":
        found = f"DNS ok, TCP refused: {place}"
        why = f"{one.address} answers, but nothing listens on port {one.peer.port}"
        remedy = f"persia logs --service {one.peer.name} --tail 50"
    elif one.outcome == "filtered":
        found = f"DNS ok, TCP filtered (timeout): {place}"
        why = f"{one.address} does not answer: a firewall or a network policy drops the packets in this direction"
        sources = " ".join(container.addresses)
        remedy = f"allow TCP connections from {sources} to port {one.peer.port} of {one.address}"
    else:
        found, why = f"DNS ok, no route: {place}", f"{one.address} cannot be reached from {container.name}"
        remedy = "check that both services share a network: docker compose config"
    return Check("connection", "fail", found, why, remedy, ExitCode.UNREACHABLE)


def _table(found: Iterable[Inside]) -> list[str]:
    """Return the connections as lines: a row for each container, a column for each peer."""
    rows = [*found]
    heads = [*dict.fromkeys(one.peer.name for each in rows for one in each.reached)]
    lines = [["from \\ to", *heads]]
    for each in rows:
        cells = {one.peer.name: one for one in each.reached}
        lines.append([each.container.name, *(_cell(cells.get(head)) for head in heads)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads) + 1)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _cell(one: Reached | None) -> str:
    if one is None:
        return "-"
    return f"{one.seconds * 1000:.1f} ms" if one.outcome == "reached" else one.outcome
