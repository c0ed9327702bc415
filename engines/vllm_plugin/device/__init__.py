"""Packs and unpacks KV blocks on the device that holds them: Triton kernels, staging, streams.

1. ``device_check`` compares the kernels with the host's codec on a scratch cache, before the
   first request.
2. ``checked_blocks`` sends blobs of the checked codec to the device, and all others to the host.
3. ``device_blocks`` runs a save or a load, blob by blob, each direction on a ``copy_stream`` of its
   own. ``kv_views`` gives the addresses of K and V to kernels. ``accelerator`` provides streams,
   which keep work in order, and pinned memory.
4. A ``staging_layout`` defines the contents of that memory: raw rows, or packed rows
   (``packed_layout``, ``payload_layouts``). ``kernels`` fill and read it.
"""
