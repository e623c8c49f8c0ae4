"""Has JAX keep compiled programs in the cache directory, so that the next process loads them."""

from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxembed.engine.autotune.calibrate import host_id
from jaxembed.engine.compiles import replace_unreadable_programs
from jaxembed.platform.cache_folder import make_private, refuse_shared


def keep_programs(cache_dir: Path) -> None:
    """Keep the programs that this process compiles in `cache_dir`, in a folder for this host.

    It sets JAX's persistent compilation cache, which holds for the whole process. Where the process
    has set it already, for example by JAX_COMPILATION_CACHE_DIR, nothing is changed. Raises OSError
    if the folder cannot be made, and ConfigError if others can write to it.
    """
    config: Any = jax.config  # its attributes are made at run time
    if config.jax_compilation_cache_dir is not None:
        return
    programs = cache_dir / "programs" / host_id()
    for folder in (cache_dir, programs.parent, programs):
        make_private(folder)
        refuse_shared(folder)
    config.update("jax_compilation_cache_dir", str(programs))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX has chosen to use none if it has compiled before
    replace_unreadable_programs(programs)
