# The image of a GPU job. torch's wheels bring the CUDA libraries, the host the driver (nvidia-container-toolkit).
# With a docker or kubernetes pool its container is one flow run; by itself it is the worker of a process pool:
#   docker build -t finetune .
#   docker run --init --read-only --tmpfs /tmp --gpus all --shm-size 8g -v /srv/finetune:/data -e PREFECT_API_URL=... finetune
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# The compiler is for the kernels that torch compiles while it runs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv

ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /app

# Dependencies first: this layer changes only with these files.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install -c constraints.txt '.[s3,delta]'

COPY prefect.yaml ./
COPY config/ config/
COPY finetuning/ finetuning/
COPY tasks/ tasks/
COPY flows/ flows/
COPY samples/ samples/

# The code is root's and read-only for the worker; what a run writes goes to the volume at /data.
RUN useradd --create-home --uid 10001 finetune && install -d -o finetune /data
USER finetune
# Prefect itself writes, too, before our code is there to send it below the storage root.
ENV FINETUNE_PROJECT_DIR=/app \
    FINETUNE_STORAGE_ROOT=/data \
    PREFECT_HOME=/data/prefect
VOLUME /data

CMD ["prefect", "worker", "start", "--pool", "h100", "--type", "process", "--limit", "1"]
