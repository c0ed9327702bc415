"""The tiers in which packed blobs are stored: RAM, disk, Redis; one protocol, one contract suite.

The store calls a tier from its own threads, and a tier may fail at any time:

1. ``registry.open_usable_tiers`` opens the tiers that are enabled, fastest first.
2. ``put_many`` and ``replace`` write; a blob that does not fit is refused, which is not an error.
3. ``get_many`` reads; an absent blob is ``None``. The store verifies the others by checksum.
4. ``touch`` and ``pin`` mark chains as in use; local tiers evict by themselves
   (``return_order``), and Redis as its server is set up.
5. ``delete_many`` removes forgotten blobs.

Data that leaves the process is sealed with the server's secret (``seal``): without
the secret no data can be put there that is trusted.

Every error of the medium becomes ``kvstore.errors.TierUnavailable``, or ``TierInUse`` for a
folder that another process owns, and never costs more than a prefill.

A new tier is a module here, or a sub-package if it needs several. It implements ``Tier``; a local
one keeps a budget with ``ReturnOrder``. ``open_tiers`` in ``registry.py`` opens it (and
``open_usable_tiers`` knows which may be missing), and it joins ``KINDS`` of
``tests/contract/tier_rig.py``, so that ``test_tiers.py`` and ``test_tier_model.py`` run over it.
Its name goes into ``kvstore.session.TierName``, and a row into the table ``TIERS`` there. What is
said of each tier elsewhere:

- its budget and time to live: ``StoreConfig``; a tenant's limit: ``gateway.keys.Limits``, set by
  ``gateway.admin.routes``
- how its budget is found: ``launch.settings.budgets``; divided among replicas: ``budgets`` in
  ``launch.settings.schema``, among vLLM's ranks: ``rank_share`` in
  ``engines.vllm_plugin.worker.worker_side``
- options: ``launch.cli.options``; checks and words at the start: ``launch.doctor`` and, in
  ``launch.serve``, ``preflight`` and ``run``; switched off for a measurement by hand:
  ``launch.calibrate.program``
- the tier in which sessions rest while their model is not loaded: ``launch.serve.build``; where
  they go when a replica ends: ``SHARED`` in ``engines.on_ray.front``
- the plan: ``launch.plan``, and the columns that print it: ``launch.cli``
- the word in ``x-thermocline-cache``: ``engines.http``; vLLM's word for the medium:
  ``engines.vllm_plugin.reports``
- the places of a session's KV: ``gateway.watch.shape``, and in ``gateway/dashboard/page``
  ``live/store.js``, ``parts/badges.js`` and ``strip.js``, ``views/turns.js``, ``memory.js`` and
  ``sessions.js``; colours: ``style/base.css`` and ``parts.css``
"""
