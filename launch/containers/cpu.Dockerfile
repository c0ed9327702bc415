# Gateway and the mlx_lm engine, for CPUs. From the checkout's root, with a model in ./models:
#
#   docker build -f launch/containers/cpu.Dockerfile -t thermocline:cpu .
#   docker run --rm -p 127.0.0.1:8080:8080 -v thermocline:/data -v "$PWD/models:/models:ro" \
#     -v "$PWD/keys.txt:/keys.txt:ro" thermocline:cpu --model /models/NAME --api-keys /keys.txt
#
# The image has no C++ compiler, so mlx runs its operations one by one instead of fused. It also has
# no sample model, which launch/install.sh installs from PyPI. This file is linted; we have never
# built the image.

FROM python:3.12-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY engines engines
COPY kvstore kvstore
COPY scheduler scheduler
COPY thermocline thermocline
COPY launch launch
RUN python -m venv /opt/thermocline \
    && /opt/thermocline/bin/pip install --no-cache-dir '.[mlx,blas,redis]'

FROM python:3.12-slim-bookworm
COPY --from=build /opt/thermocline /opt/thermocline
RUN useradd --uid 1000 --create-home thermocline \
    && install -d -o thermocline -g thermocline -m 0700 /data
ENV PATH=/opt/thermocline/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    THERMOCLINE_DATA_DIR=/data \
    THERMOCLINE_CACHE_DIR=/data/cache \
    THERMOCLINE_GATEWAY__HOST=0.0.0.0
USER 1000
VOLUME /data
EXPOSE 8080
HEALTHCHECK --start-period=10m --interval=30s --timeout=5s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/livez', timeout=4)"]
# SIGTERM lets running answers end (gateway.drain_s).
STOPSIGNAL SIGTERM
ENTRYPOINT ["thermocline", "serve", "--profile", "cpu"]
