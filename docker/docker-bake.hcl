# docker buildx bake --file docker/docker-bake.hcl [cpu|rocm|cuda], from the repository's root.
# Bases and versions are the Dockerfiles' ARG defaults (versions.json); override with --set 'rocm.args.BASE_IMAGE=…'.

variable "PREFIX" {
  default = "portamoe"
}

variable "TAG" {
  default = "latest"
}

variable "REVISION" {
  default = "unknown"
}

variable "CREATED" {
  default = "unknown"
}

group "default" {
  targets = ["cpu"]
}

target "common" {
  context = "."
  args = {
    REVISION = REVISION
    CREATED  = CREATED
  }
}

target "cpu" {
  inherits   = ["common"]
  dockerfile = "docker/Dockerfile.cpu"
  tags       = ["${PREFIX}-cpu:${TAG}"]
  platforms  = ["linux/amd64"]
}

target "rocm" {
  inherits   = ["common"]
  dockerfile = "docker/Dockerfile.rocm"
  tags       = ["${PREFIX}-rocm:${TAG}"]
  platforms  = ["linux/amd64"]
}

target "cuda" {
  inherits   = ["common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${PREFIX}-cuda:${TAG}"]
  platforms  = ["linux/amd64", "linux/arm64"]
}
