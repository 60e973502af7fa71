"""The composition root: builds every part from the settings, and serves."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import anyio
import structlog

from holdfast.domain.errors import HoldfastError, IntegrityError
from holdfast.replicator import listener
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.engine import Engine, Tiers
from holdfast.replicator.keeping import Keeper
from holdfast.replicator.lending import readers_of
from holdfast.replicator.mover import Mover
from holdfast.replicator.notes import listen_to_notes, open_notes
from holdfast.replicator.preallocation import keep_ready, require_room
from holdfast.replicator.scrub import Scrubber
from holdfast.replicator.servicer import SERVICE, Servicer
from holdfast.replicator.settings import ReplicatorSettings
from holdfast.replicator.sharing import Arrivals
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.stager import Stager
from holdfast.replicator.store_scrub import StoreScrubber
from holdfast.replicator.store_sync import OpenStores, StoreSync
from holdfast.replicator.threads import Pace, Threads, be_nice
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.tiers.warm import WarmFiles
from holdfast.replicator.transport.client import Client
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.transport.intake import Intake
from holdfast.replicator.transport.kept import Served
from holdfast.replicator.transport.links import LinkDoor, Links
from holdfast.replicator.transport.secure import Secure
from holdfast.replicator.transport.server import Server
from holdfast.replicator.view import Held, Tier
from holdfast.runtime import freeze
from holdfast.runtime.private import make_private
from holdfast.runtime.ready import announce
from holdfast.runtime.rpc.grpc_server import listen
from holdfast.runtime.service import guarded
from holdfast.runtime.trust.identities import Role
from holdfast.shards import Manifest
from holdfast.v1 import replicator_pb2_grpc as rpc

URGENT_THREADS = 8
TRANSFER_THREADS = 16
BACKGROUND_THREADS = 16  # one copy to disk per rank of a node, and as many to peers
COMMIT_THREADS = 4
ARCHIVE_THREADS = 4
RETRIEVAL_THREADS = 8
LOCKS_INTERVAL_S = 15.0

log = structlog.get_logger("holdfast.replicator")


async def serve(settings: ReplicatorSettings) -> None:
    """Runs until cancelled."""
    structlog.contextvars.bind_contextvars(node=settings.node)  # in every log line of this process
    for directory in (settings.memory_dir, settings.disk_dir):
        make_private(directory)
    readers = readers_of(settings)
    warm = WarmFiles(settings.memory_dir)
    spare = (settings.replicator_preallocated_shards, settings.replicator_preallocated_shard_bytes)
    require_room(warm, *spare, settings.memory_dir)
    threads = Threads(
        urgent=URGENT_THREADS,
        transfers=TRANSFER_THREADS,
        background=BACKGROUND_THREADS,
        commits=COMMIT_THREADS,
        archive=ARCHIVE_THREADS,
        retrievals=RETRIEVAL_THREADS,
    )
    checksummer = Checksummer(settings.replicator_checksum_threads)
    commit_checksummer = Checksummer(
        settings.replicator_checksum_threads, nice=True, digests=settings.replicator_digests
    )
    sockets = OpenSockets()
    disk_pace = Pace(settings.replicator_disk_bytes_per_s_max)
    peer_pace = Pace(settings.replicator_peer_bytes_per_s_max)
    store_pace = Pace(settings.replicator_store_bytes_per_s_max)
    scrub_pace = Pace(settings.replicator_scrub_bytes_per_s_max)
    store_scrub_pace = Pace(settings.replicator_store_scrub_bytes_per_s_max)
    stores = OpenStores()
    warm.sweep()
    tiers = Tiers(
        images=ImageTier(
            settings.memory_dir,
            settings.node,
            commit_checksummer,
            overflow=settings.disk_dir,
            owners=None if readers is None else readers.owners,
        ),
        staged=FileTier("memory", settings.memory_dir, "staged", warm=warm, compares_later=True),
        disk=FileTier("disk", settings.disk_dir),
    )
    limits = Limits(
        settings.replicator_connect_timeout_s,
        settings.replicator_io_timeout_s,
        settings.replicator_streams_per_shard_max,
    )
    tls = settings.tls_as(Role.AGENT, Role.REPLICATOR, name=settings.node)
    secure = Secure(tls, optional=settings.replicator_tls == "optional")
    client = Client(limits, sockets, secure)
    engine = Engine(tiers, settings.disk_dir, threads)
    arrivals = Arrivals(wait_s=settings.replicator_io_timeout_s / 2)
    store_sync = StoreSync(engine, stores, store_pace, client, settings.node, arrivals)
    mover = Mover(engine, client, checksummer, store_sync, disk_pace=disk_pace, peer_pace=peer_pace)
    takers = ThreadPoolExecutor(settings.replicator_connections_max, "take", initializer=be_nice)
    keeper = Keeper(engine, mover.idle, settings.replicator_retention_s)
    links = Links(client, threads, LinkDoor())
    served = Served(settings.replicator_connections_max // 4)
    server = _data_server(engine, checksummer, limits, sockets, takers, arrivals, links.door, secure, served)
    scrubber = Scrubber(engine, client, interval_s=settings.replicator_scrub_interval_s, pace=scrub_pace)
    store_scrubber = StoreScrubber(
        engine, store_sync, interval_s=settings.replicator_store_scrub_interval_s, pace=store_scrub_pace
    )
    door = listener.bind(settings.replicator_listen)
    try:
        endpoint = listener.endpoint(door, settings.address)
        lend = readers.lend if readers is not None else lambda _: None
        stager = Stager(engine, client, store_sync, checksummer, settings.node, lend)
        servicer = Servicer(engine, stager, mover, links, endpoint)
        await engine.start()
        async with (
            await open_notes(settings.replicator_notes) as notes,
            anyio.create_task_group() as tasks,
            listen(
                f"unix:{settings.replicator_socket}",
                partial(rpc.add_ReplicatorServicer_to_server, servicer),
                services=(SERVICE,),
            ),
        ):
            guarded(tasks, "freezes", partial(freeze.watch, lambda _: engine.unwatched()))
            guarded(tasks, "notes", partial(listen_to_notes, notes, engine.hint, engine.missed))
            guarded(tasks, "hints", engine.follow_hints)
            guarded(tasks, "rescan", partial(engine.rescan, settings.replicator_rescan_interval_s))
            guarded(tasks, "locks", partial(engine.watch_locks, LOCKS_INTERVAL_S))
            guarded(tasks, "mover", mover.run)
            guarded(tasks, "standby", partial(keep_ready, engine, warm, *spare))
            guarded(tasks, "keeper", keeper.run)
            guarded(tasks, "scrubber", scrubber.run)
            guarded(tasks, "store scrubber", store_scrubber.run)
            guarded(
                tasks, "connections", partial(listener.accept, door, server.serve, settings.replicator_connections_max)
            )
            announce(settings.ready_file, {"endpoint": endpoint, "socket": str(settings.replicator_socket)})
            log.info("serving", node=settings.node, endpoint=endpoint)
            try:
                await anyio.sleep_forever()
            finally:  # runs first at a stop, so that no task waits for a thread that waits for a peer
                sockets.close_all()
                for pace in (disk_pace, peer_pace, store_pace, scrub_pace, store_scrub_pace):
                    pace.stop()
                stores.close()
    finally:
        door.close()
        client.kept.close()
        threads.close()
        takers.shutdown(wait=False, cancel_futures=True)
        checksummer.close()
        commit_checksummer.close()
        for path in (settings.replicator_notes, settings.replicator_socket):
            with suppress(FileNotFoundError):
                path.unlink()


def _data_server(
    engine: Engine,
    checksummer: Checksummer,
    limits: Limits,
    sockets: OpenSockets,
    takers: Executor,
    arrivals: Arrivals,
    links: LinkDoor,
    secure: Secure,
    served: Served,
) -> Server:
    """Build the data server. Its threads report events to the event loop, which owns all state."""
    loop = asyncio.get_running_loop()

    def arrived(name: str, manifest: Manifest, tier: Tier) -> None:
        loop.call_soon_threadsafe(engine.arrived, name, manifest, tier)

    def suspect(name: str, held: Held) -> None:
        try:
            with engine.tiers[held.tier].open(name, held.key) as shard:
                checksummer.verify(shard.manifest, shard.data, shard.reader.prefault, digests=True)
        except IntegrityError as error:
            with suppress(OSError):  # the file stays in place, but is removed from the inventory
                engine.tiers[held.tier].quarantine(name, held.key)
            loop.call_soon_threadsafe(engine.lost, name, held, str(error))
        except (HoldfastError, OSError):
            return  # overwritten or deleted since, so no reader is directed to it

    return Server(
        limits=limits,
        sockets=sockets,
        tiers=tuple((tier, engine.tiers[tier]) for tier in Tier),
        arrivals=arrivals,
        intake=Intake(engine.tiers.staged, engine.tiers.disk),
        takers=takers,
        token_of=engine.token_of,
        arrived=arrived,
        suspect=suspect,
        links=links,
        secure=secure,
        served=served,
    )
