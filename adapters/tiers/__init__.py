"""Places below the arena where chunks are kept: files, Valkey or Redis, Mooncake Store."""
