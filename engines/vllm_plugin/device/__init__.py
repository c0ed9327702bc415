"""Packs and unpacks KV blocks on the device that holds them: Triton kernels, staging, streams.

1. ``device_check`` compares the kernels with the host's codec on a ``scratch_cache``, before the
   first request.
2. ``checked_blocks`` sends blobs of the checked codec to the device, and all others to the host.
3. ``device_blocks`` runs a save (``device_save``) or a load (``device_load``), blob by blob, each
   direction on a ``copy_stream`` of its own. ``kv_views`` gives kernels the addresses of K and V,
   ``staging`` gives pinned memory, and ``accelerator`` keeps the order.
4. ``layouts`` define the contents of that memory, and ``kernels`` fill and read it.
"""
