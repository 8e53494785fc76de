"""``python -m lmcache_kernels.adapters.server``: a cache server without the command line's looks."""

from __future__ import annotations

import argparse
import logging

from .main import serve


def main() -> None:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(prog="python -m lmcache_kernels.adapters.server")
    parser.add_argument("--host", default="127.0.0.1", help="loopback address to bind")
    parser.add_argument("--port", type=int, default=5555, help="TCP port; 0 takes any free one")
    parser.add_argument("--l1-size-gb", type=float, default=4.0, help="GiB of /dev/shm for chunks")
    parser.add_argument("--chunk-size", type=int, default=256, help="tokens of one chunk")
    parser.add_argument("--eviction-policy", default="lru", help="lru or s3fifo")
    parser.add_argument(
        "--eviction-trigger-watermark",
        type=float,
        default=1.0,
        help="used part of the memory at which some is freed ahead; 1: never",
    )
    parser.add_argument(
        "--eviction-ratio", type=float, default=0.2, help="part of the memory that is freed then"
    )
    parser.add_argument(
        "--worker-reap-timeout-seconds",
        type=float,
        default=120.0,
        help="silence after which a worker that has pinged is dropped; 0: never",
    )
    parser.add_argument(
        "--worker-registration-grace-seconds",
        type=float,
        default=600.0,
        help="the same of one that has not pinged yet",
    )
    parser.add_argument("--curve-secret-key", default="", help="the server's *.key_secret file")
    parser.add_argument(
        "--curve-clients", default="", help="directory of the *.key files of those who may connect"
    )
    parser.add_argument("--stop-on-eof", action="store_true", help="stop when standard input ends")
    chosen = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    serve(
        host=chosen.host,
        port=chosen.port,
        size_gb=chosen.l1_size_gb,
        chunk_size=chosen.chunk_size,
        eviction_policy=chosen.eviction_policy,
        eviction_watermark=chosen.eviction_trigger_watermark,
        eviction_ratio=chosen.eviction_ratio,
        worker_reap_timeout=chosen.worker_reap_timeout_seconds,
        worker_registration_grace=chosen.worker_registration_grace_seconds,
        curve_secret_key=chosen.curve_secret_key,
        curve_clients=chosen.curve_clients,
        stop_on_eof=chosen.stop_on_eof,
    )


if __name__ == "__main__":
    main()
