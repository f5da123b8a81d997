#!/usr/bin/env bash
# Are the two commands of the README enough on a new machine? Machines keep what was installed on them for other reasons;
# an empty root has nothing of that.
set -euo pipefail
usage() {
  cat <<'END'
usage: scripts/fresh.sh [--steps N] [--keep DIR]
       scripts/fresh.sh --enter DIR [COMMAND…]
       scripts/fresh.sh --check

Makes a minimal Debian in a folder from this machine's own apt sources (those whose origin is Debian), clones HEAD into it
as /minillm, and runs there, with an empty environment and a host name that nothing resolves:
  1. scripts/quickstart.sh with one package taken out of the list in scripts/lib/setup.sh, which has to fail
  2. scripts/quickstart.sh
  3. the packages that test.sh --full installs, and a Python environment
  4. scripts/test.sh --smoke
What is not committed is not in it. Where ccache is installed, what this machine has compiled of the same sources with the
same compiler is taken from its cache. Needs root, mmdebstrap (installed if missing), the network, and 2 GB below TMPDIR.

  --steps N    quickstart trains N steps instead of those of its configuration
  --keep DIR   makes the root in DIR, which must not exist, and leaves it there; otherwise it is removed, also after a
               failure
  --enter DIR  runs COMMAND (bash) in a root that was kept, in the same way
  --check      does nothing but say why all this cannot run here: returns 0 if it can, 1 with the reason if not

Returns 1 when something failed.
END
}

# shellcheck source=scripts/lib/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/setup.sh"

# Taken out of the list, so that this test is known to notice. CMake's package of oneDNN looks for OpenCL; Debian only
# recommends it, so most machines have it without anyone having asked for it.
planted=ocl-icd-opencl-dev planted_error="Could NOT find OpenCL"

# debian_sources: a line of sources.list for each of Debian's archives that this machine's apt uses.
debian_sources() {
  local signed="[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
  # shellcheck disable=SC2016 # apt-get expands
  apt-get indextargets --format "deb $signed "'$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' \
    'Origin: Debian' "Architecture: $(dpkg --print-architecture)" | grep '] https\?://'
}

# apt's proxies are in its configuration or in the environment; neither reaches the root otherwise.
proxies() {
  local scheme variable proxy
  for scheme in http https; do
    variable=${scheme}_proxy
    eval "$(apt-config shell proxy "Acquire::$scheme::Proxy")"
    proxy=${proxy:-${!variable:-}}
    [[ -z $proxy ]] || printf 'Acquire::%s::Proxy "%s";\n' "$scheme" "$proxy"
    proxy=
  done
}

# why_not: prints why it cannot run here, nothing if it can.
why_not() {
  local sources uri suite
  if ((EUID != 0)); then
    echo "needs root"
  elif ! command -v apt-get >/dev/null; then
    echo "there is no apt-get"
  elif ! unshare --mount --uts --pid --fork true 2>/dev/null; then
    echo "the kernel allows no namespaces (unshare)"
  elif ! (require_packages fresh) &>/dev/null; then
    echo "mmdebstrap and git are needed, and apt-get cannot install them"
  elif ! git -C "$repo_root" rev-parse HEAD &>/dev/null; then
    echo "$repo_root is no git checkout"
  elif ! sources=$(debian_sources || { apt-get update && debian_sources; } 2>/dev/null); then
    echo "apt has no source on the network whose origin is Debian"
  else
    read -r _ _ uri suite _ <<<"$sources"
    fetched=$(mktemp)
    /usr/lib/apt/apt-helper download-file "${uri}dists/$suite/InRelease" "$fetched" &>/dev/null ||
      echo "$uri does not answer"
    rm -f "$fetched"
  fi
}

# isolated COMMAND…: with namespaces of its own, so that no mount is ever visible outside, where the root is removed, and
# no process survives, however this ends. In the background, because bash handles no signal while it runs a command.
child=
isolated() {
  local status=0
  unshare --mount --propagation private --uts --pid --mount-proc --fork --kill-child "$@" <&0 &
  child=$!
  wait "$child" || status=$?
  child=
  return "$status"
}

in_root() { # COMMAND…
  # shellcheck disable=SC2016 # the inner shell expands
  isolated bash -c '
    set -euo pipefail
    root=$1 compiled=$2
    shift 2
    mount --bind "$root" "$root"
    for folder in proc sys dev; do
      mount --rbind "/$folder" "$root/$folder"
    done
    mount -t tmpfs tmpfs "$root/dev/shm"
    if [[ -d $compiled && -d $root/ccache ]]; then
      mount --bind -o ro "$compiled" "$root/ccache"
    fi
    hostname fresh.invalid
    exec chroot "$root" /usr/bin/env -i "$@"' bash "$root" "$(ccache --get-config cache_dir 2>/dev/null)" "$@"
}

clean_up() {
  if [[ -n $child ]]; then
    kill -KILL "$child"
    wait "$child" || true
  fi 2>/dev/null
  rm -rf "$scratch"
  [[ -n $keep ]] || rm -rf --one-file-system "$root"
}

make_root() {
  local sources options=(--variant=apt --quiet --dpkgopt=force-unsafe-io --aptopt="$scratch/proxies")
  sources=$(debian_sources)
  [[ $sources != *https://* ]] || options+=(--include=ca-certificates)
  proxies >"$scratch/proxies"
  ! command -v ccache >/dev/null || options+=(--include=ccache)
  isolated mmdebstrap "${options[@]}" "" "$root" - <<<"$sources"
  if [[ -x $root/usr/bin/ccache ]]; then
    mkdir "$root/ccache"
    printf '%s\n' 'cache_dir = /ccache' 'temporary_dir = /tmp/ccache' 'read_only = true' 'stats = false' \
      >"$root/etc/ccache.conf"
  fi
  git clone --quiet "$repo_root" "$clone"
}

quickstart_fails_without_a_package() {
  local log=$scratch/planted.log status=0
  sed -i "/\[$planted\]=/d" "$clone/scripts/lib/setup.sh"
  ! git -C "$clone" diff --quiet || die "scripts/lib/setup.sh has no line for $planted, which was to be taken out"
  in_root /minillm/scripts/quickstart.sh &>"$log" || status=$?
  if ((status == 0)) || ! grep -q "$planted_error" "$log"; then
    cat "$log"
    die "without $planted quickstart.sh should have failed with '$planted_error'; its exit code was $status"
  fi
  git -C "$clone" checkout --quiet scripts
  rm -rf "$clone/build"
}

quickstart() {
  if [[ -n $steps ]]; then
    sed -i "s/\"steps\": [0-9]*/\"steps\": $steps/" "$clone/configs/quickstart.json"
  fi
  in_root /minillm/scripts/quickstart.sh
}

install_the_rest() {
  in_root /bin/bash -c '
    set -euo pipefail
    source /minillm/scripts/lib/setup.sh
    require_packages build lint
    clang-format --version
    clang-tidy --version
    python3 -m venv /tmp/venv
    /tmp/venv/bin/pip --version'
}

times=()
part() { # NAME COMMAND…
  local name=$1 start=$SECONDS
  shift
  note "fresh root: $name"
  "$@"
  times+=("$(printf '%4d s  %s' $((SECONDS - start)) "$name")")
}

steps='' keep='' enter=''
while (($# > 0)); do
  case $1 in
    -h | --help)
      usage
      exit
      ;;
    --check)
      why=$(why_not)
      [[ -z $why ]] || die "$why"
      exit
      ;;
    --steps)
      steps=${2:-}
      [[ $steps =~ ^[1-9][0-9]{0,5}$ ]] || die "--steps: a whole number from 1 to 999999, not '$steps'"
      shift 2
      ;;
    --keep)
      keep=${2:-}
      [[ -n $keep ]] || die "--keep: which folder?"
      [[ ! -e $keep ]] || die "--keep: '$keep' exists"
      shift 2
      ;;
    --enter)
      enter=${2:-}
      [[ -x $enter/usr/bin/env && -d $enter/minillm ]] || die "--enter: '$enter' is no root that --keep left"
      shift 2
      break
      ;;
    *) die "no option '$1'" ;;
  esac
done

if [[ -n $enter ]]; then
  root=$(cd -- "$enter" && pwd)
  in_root "${@:-/bin/bash}"
  exit
fi
why=$(why_not)
[[ -z $why ]] || die "cannot run here: $why"

scratch=$(mktemp -d)
if [[ -n $keep ]]; then
  mkdir -p -- "$keep"
  root=$(cd -- "$keep" && pwd)
else
  root=$(mktemp -d)
fi
chmod 755 "$root"
clone=$root/minillm
trap clean_up EXIT
[[ -z $(git -C "$repo_root" status --porcelain) ]] || note "fresh root: HEAD only, without what is not committed"

part "mmdebstrap and git clone" make_root
part "quickstart.sh fails without $planted" quickstart_fails_without_a_package
part "quickstart.sh" quickstart
part "packages of test.sh --full" install_the_rest
part "test.sh --smoke" in_root /minillm/scripts/test.sh --smoke

printf '\nfresh root: every part passed\n'
printf '  %s\n' "${times[@]}"
[[ -z $keep ]] || printf 'kept: scripts/fresh.sh --enter %q\n' "$keep"
