# docker build -t starter . && docker run --rm --gpus all --shm-size 2g -v "$PWD/runs:/work/runs" starter --max_epochs 1
FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /work
COPY requirements.txt .
RUN pip install -r requirements.txt
COPY train.py ./
COPY project/ project/
COPY configs/ configs/
COPY data/ data/
RUN useradd --uid 1000 --create-home worker && mkdir runs && chown 1000 runs
USER 1000
ENTRYPOINT ["python", "train.py"]
