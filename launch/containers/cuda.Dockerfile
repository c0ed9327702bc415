# Gateway and vLLM in one container, for NVIDIA GPUs. From the checkout's root, with a model in ./models:
#
#   docker build -f launch/containers/cuda.Dockerfile -t thermocline:cuda .
#   docker run --rm --gpus all --shm-size 8g -p 127.0.0.1:8080:8080 -v thermocline:/data \
#     -v "$PWD/models:/models:ro" -v "$PWD/keys.txt:/keys.txt:ro" \
#     thermocline:cuda --model /models/NAME --api-keys /keys.txt
#
# On a GB10 append --profile gb10. This file is linted; we have never built the image.

FROM vllm/vllm-openai:v0.32.0
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY engines engines
COPY kvstore kvstore
COPY scheduler scheduler
COPY thermocline thermocline
COPY launch launch
# The gateway has its own environment. vLLM's interpreter gets the packages that our plug-in needs
# besides vLLM (the group "vllm" of pyproject.toml without test tools). It imports our packages from
# /source, to which the gateway's editable installation points, too.
RUN python3 -m venv /opt/thermocline \
    && /opt/thermocline/bin/pip install --no-cache-dir --editable '.[redis]' \
    && python3 -m pip install --no-cache-dir 'cryptography>=47' 'crc32c>=2.7' 'httptools>=0.6' \
    'lmdb>=3,<4' 'msgspec>=0.19' 'multidict>=6' 'numba>=0.65' 'prometheus-client>=0.21' 'psutil>=6' \
    'redis[hiredis]>=6' 'threadpoolctl>=3.5' \
    && useradd --uid 1001 --create-home thermocline \
    && install -d -o thermocline -g thermocline -m 0700 /data
ENV PATH=/opt/thermocline/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    THERMOCLINE_DATA_DIR=/data \
    THERMOCLINE_CACHE_DIR=/data/cache \
    THERMOCLINE_GATEWAY__HOST=0.0.0.0 \
    THERMOCLINE_ENGINE__VLLM__PYTHON=/usr/bin/python3
USER 1001
VOLUME /data
EXPOSE 8080
HEALTHCHECK --start-period=30m --interval=30s --timeout=5s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/livez', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["thermocline", "serve", "--profile", "cuda"]
