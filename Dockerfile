# docs/faq.md#does-it-run-in-a-container has the commands.
FROM debian:bookworm-slim
# What packages of Python cannot bring: venv, and libnuma for vLLM on a CPU; gcc and headers for GPUs. The tests use git.
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates gcc git libnuma1 python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /grpo.py
COPY setup.sh ./
COPY requirements requirements
# A build sees no GPU, so these are the packages of a CPU.
RUN ./setup.sh
COPY . .
CMD ["./train.sh"]
