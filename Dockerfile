# An environment with the CPU engines that need no framework: docker build -t mithril . && docker run -it mithril mithril demo
FROM python:3.13-slim
WORKDIR /src
COPY constraints.txt registry.json ./
COPY mithril-core mithril-core
COPY plugins plugins
RUN pip install --no-cache-dir -c constraints.txt ./mithril-core ./plugins/mithril-passes ./plugins/mithril-tools \
    ./plugins/mithril-numpy ./plugins/mithril-parallel ./plugins/mithril-train ./plugins/mithril-targets ./plugins/mithril-gguf ./plugins/mithril-cbackend \
    && rm -rf /src
WORKDIR /work
CMD ["python"]
