# shellcheck shell=bash
# shellcheck disable=SC2154  # repo_root is setup.sh's, missing_for_build toolchain.sh's
# Sourced: the programs that the stages run, in one folder (GPU_CHECK_KIT), built here or brought from another machine:
#
#   kit.txt        KEY=VALUE lines: arch, mpi, nvcc, commit
#   *              minillm and the tests, with NCCL
#   shared/*       the same for ranks that share the GPU: MPI in NCCL's place
#   lib/, mpi/     from --prepare only: shared libraries, Open MPI's launcher and plugins
#   no_nccl/       from --prepare only: libnccl.so.2 for machines that have none
#
# Both kinds of programs come out of one build folder: only a handful of objects differ.

kit_fact() { sed -n "s/^$1=//p" "$GPU_CHECK_KIT/kit.txt" 2>/dev/null || true; }
kit_has_mpi() { [[ $(kit_fact mpi) == yes ]]; }

# configure_kit ARCH SHARED
configure_kit() {
  local arch=$1 shared=$2 mpi=OFF tests=OFF prefix_path
  prefix_path=$(prefixes | paste -sd ';')
  local -a options=()
  [[ $arch == native ]] || arch+=-real
  ! find_program mpicxx >/dev/null || mpi=ON
  ! find_package GTest >/dev/null || tests=ON
  if command -v ccache >/dev/null; then
    options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  fi
  if [[ ! -e $(cuda_home)/include/cublasLt.h ]]; then
    # A toolkit without cuBLAS: PyTorch's packages have it.
    CPATH=$(find_header cublasLt.h)${CPATH:+:$CPATH}
    export CPATH
    options+=("-DCUDA_cublasLt_LIBRARY=$(find_library libcublasLt.so libcublasLt.so.13)")
  fi
  run cmake -S "$repo_root" -B "$GPU_CHECK_WORK/tree" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
    -DMINILLM_SIM=OFF -DMINILLM_MPI=$mpi -DMINILLM_TESTS=$tests -DMINILLM_SHARED_GPU="$shared" \
    "-DCMAKE_CUDA_COMPILER=$(find_program nvcc)" "-DCMAKE_CUDA_ARCHITECTURES=$arch" \
    "-DCMAKE_PREFIX_PATH=$prefix_path" -DFETCHCONTENT_FULLY_DISCONNECTED=ON \
    "-DNCCL_LIBRARY=$(find_library libnccl.so libnccl.so.2)" "-DNCCL_INCLUDE_DIR=$(find_header nccl.h)" \
    "-DCMAKE_PROJECT_INCLUDE=$repo_root/scripts/lib/gpu_check/relocatable.cmake" "${options[@]}"
}

build_targets() { # TARGET…: all that can be built; returns 1 when one cannot
  run cmake --build "$GPU_CHECK_WORK/tree" --parallel "$(job_count)" --target "$@" -- -k 0
}

tree_has() { grep -q "^MINILLM_$1:.*=ON" "$GPU_CHECK_WORK/tree/CMakeCache.txt" 2>/dev/null; }

# build_program ARCH: minillm, with NCCL, and kit.txt: what most stages need
build_program() {
  local mpi=no
  configure_kit "$1" OFF
  build_targets minillm
  [[ -z $GPU_CHECK_DRY ]] || return 0
  ! tree_has MPI || mpi=yes
  mkdir -p "$GPU_CHECK_KIT"
  collect "$GPU_CHECK_KIT"
  printf '%s=%s\n' arch "$1" mpi $mpi commit "$(commit)" \
    nvcc "$("$(find_program nvcc)" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')" >"$GPU_CHECK_KIT/kit.txt"
}

# The tests, with NCCL. A program that cannot be built does not keep the others away.
build_tests() {
  local status=0
  tree_has TESTS || [[ -n $GPU_CHECK_DRY ]] || return 0
  # Made by build_shared in this folder earlier, it would be taken for a test with NCCL.
  rm -f "$GPU_CHECK_WORK/tree/tests/device/mismatch_test"
  # Without MPI tests/parity is empty.
  build_targets tests/{kernels,device,parity}/all shard_executor_test || status=$?
  [[ -n $GPU_CHECK_DRY ]] ||
    collect "$GPU_CHECK_KIT" 'kernels/*_test' 'device/*_test' shard/shard_executor_test parity/parity_test
  return $status
}

# build_shared ARCH: minillm and tests with MPI in NCCL's place
build_shared() {
  local -a tests=()
  local status=0
  configure_kit "$1" ON
  if tree_has TESTS || [[ -n $GPU_CHECK_DRY ]]; then
    tests=({device/{collectives,mismatch},shard/shard_executor,parity/parity,distributed/sharding}_test)
  fi
  build_targets minillm "${tests[@]##*/}" || status=$?
  [[ -z $GPU_CHECK_DRY ]] || return 0
  mkdir -p "$GPU_CHECK_KIT/shared"
  collect "$GPU_CHECK_KIT/shared" "${tests[@]}"
  return $status
}

# collect TO TEST…: minillm and tests, paths or patterns under tests/, as far as they have been built
collect() {
  local tree=$GPU_CHECK_WORK/tree to=$1 pattern program
  shift
  for pattern in minillm "${@/#/tests/}"; do
    while read -r program; do
      [[ ! -x $program ]] || install -s -m 755 "$program" "$to/${program##*/}"
    done < <(compgen -G "$tree/$pattern" || true)
  done
}

commit() { git -C "$repo_root" describe --always --dirty 2>/dev/null || echo unknown; }

# Every machine that can run the programs has these (glibc, the compiler's, the driver), or they are too large to carry
# and come with CUDA or PyTorch.
foreign_library='^(ld-linux.*|lib(c|m|dl|rt|pthread|resolv|util|stdc\+\+|gcc_s|cuda|nccl|cublas|cublasLt)\.so.*)$'

# gather_libraries TO FILE…: what the files need, and what that needs, without the foreign ones
gather_libraries() {
  local to=$1 path name
  shift
  ldd "$@" | sed -n 's/.* => \(\/[^ ]*\) (.*/\1/p' | sort -u | while read -r path; do
    name=$(basename -- "$path")
    [[ $name =~ $foreign_library ]] || [[ -e $to/$name ]] || install -m 644 "$path" "$to/$name"
  done
}

# Open MPI as far as one machine needs it. Plugins for networks, batch systems and OpenSHMEM would bring large libraries.
gather_mpi() {
  local to=$GPU_CHECK_KIT/mpi plugins plugin data
  local -a files
  plugins=$(ompi_info --path pkglibdir --parsable | sed 's/.*://')
  data=$(ompi_info --path pkgdatadir --parsable | sed 's/.*://')
  mkdir -p "$to/bin" "$to/openmpi" "$to/share" "$to/pmix"
  install -m 755 "$(readlink -f -- "$(command -v mpirun)")" "$to/bin/mpirun"
  install -m 755 "$(readlink -f -- "$(command -v orted)")" "$to/bin/orted"
  cp -r "$data/." "$to/share"
  for plugin in "$plugins"/mca_*.so; do
    case $(basename -- "$plugin") in
      mca_*_ucx.so | mca_*_ofi.so | mca_*_openib.so | mca_*_psm*.so | mca_*_slurm.so | mca_*_usnic.so) ;;
      mca_scoll_* | mca_spml_* | mca_sshmem_* | mca_memheap_* | mca_atomic_* | mca_io_romio*) ;;
      *) install -m 755 "$plugin" "$to/openmpi/$(basename -- "$plugin")" ;;
    esac
  done
  for plugin in "$(dirname -- "$plugins")"/pmix/pmix_mca_*.so /usr/lib/*/pmix*/lib/pmix/pmix_mca_*.so; do
    [[ ! -e $plugin || $plugin == *slurm* ]] || install -m 755 "$plugin" "$to/pmix/$(basename -- "$plugin")"
  done
  mapfile -t files < <(find "$to/bin" "$to/openmpi" "$to/pmix" -type f)
  gather_libraries "$GPU_CHECK_KIT/lib" "${files[@]}"
}

# What one rank does needs no NCCL, but a program that names a library does not start without it. This one has the names
# that the programs use, and whatever is called returns 2, ncclSystemError.
make_no_nccl() { # PROGRAM…
  local name
  mkdir -p "$GPU_CHECK_KIT/no_nccl"
  nm -D --undefined-only "$@" 2>/dev/null | sed -n 's/^ *U \(nccl[A-Za-z]*\).*/\1/p' | sort -u | while read -r name; do
    case $name in
      ncclGetErrorString | ncclGetLastError) echo "const char* $name(void) { return \"NCCL is not on this machine\"; }" ;;
      *) echo "int $name(void) { return 2; }" ;;
    esac
  done | gcc -x c - -shared -fPIC -Wl,-soname,libnccl.so.2 -o "$GPU_CHECK_KIT/no_nccl/libnccl.so.2"
}

# prepare_kit PLACE: a folder, or an archive of one
prepare_kit() {
  local place=$1
  case $place in
    *.tar.gz | *.tar.xz)
      GPU_CHECK_KIT=$GPU_CHECK_WORK/kit
      fill_kit
      # Complete or not there.
      tar -C "$GPU_CHECK_KIT" --owner=0 --group=0 -caf "$place.new.${place##*.tar.}" .
      mv -f "$place.new.${place##*.tar.}" "$place"
      ;;
    *)
      GPU_CHECK_KIT=$place
      fill_kit
      ;;
  esac
  note "$place: $(du -sh "$place" | cut -f 1), $(find "$GPU_CHECK_KIT" -type f | wc -l) files. There: \
scripts/gpu_check.sh --build $(basename -- "$place")"
  $kit_complete || die "not everything could be built, see above; what could is there"
}

fill_kit() {
  local arch=${GPU_CHECK_ARCH:-90a}
  local -a files
  kit_complete=true
  list_build_dependencies >/dev/null
  ((${#missing_for_build[@]} == 0)) || die "--prepare: missing ${missing_for_build[*]}; --deps tells more"
  if [[ -f $GPU_CHECK_KIT/kit.txt ]]; then
    rm -rf "$GPU_CHECK_KIT"
  elif [[ -n $(ls -A "$GPU_CHECK_KIT" 2>/dev/null) ]]; then
    die "--prepare: $GPU_CHECK_KIT holds something else; give a new or empty folder"
  fi
  note "programs for sm_$arch"
  build_program "$arch"
  build_tests || kit_complete=false
  mkdir -p "$GPU_CHECK_KIT/lib"
  if kit_has_mpi; then
    note "programs for ranks that share the GPU"
    build_shared "$arch" || kit_complete=false
    if have_open_mpi; then
      gather_mpi
    else
      note "this MPI is not Open MPI: the other machine has to have the same"
    fi
  fi
  mapfile -t files < <(find "$GPU_CHECK_KIT" -maxdepth 1 -type f -perm -u+x)
  gather_libraries "$GPU_CHECK_KIT/lib" "${files[@]}"
  make_no_nccl "${files[@]}"
}

# What --build takes as it is, or out of an archive. GPU_CHECK_KIT becomes the folder.
unpack_kit() { # PLACE
  GPU_CHECK_KIT=$1
  [[ ! -d $1 ]] || return 0
  GPU_CHECK_KIT=$GPU_CHECK_WORK/kit
  rm -rf "$GPU_CHECK_KIT"
  mkdir -p "$GPU_CHECK_KIT"
  tar -C "$GPU_CHECK_KIT" -xf "$1" || die "--build: tar cannot unpack $1"
}

have_open_mpi() { command -v ompi_info >/dev/null && mpirun --version 2>/dev/null | grep -q 'Open MPI'; }

# Running
# ----------------------------------------------------------------------------------------------------------------------

missing_libraries() {
  local program
  for program in "$GPU_CHECK_KIT"/{minillm,*_test}; do
    [[ ! -x $program ]] || "$GPU_CHECK_WORK/in_kit" ldd "$program"
  done 2>/dev/null | sed -n 's/^[[:space:]]*\([^ ]*\) => not found.*/\1/p' | sort -u
}

# write_launchers: WORK/in_kit COMMAND… runs a command with the kit's libraries and launcher, WORK/minillm is the program
# so; for what takes one path. Links to libraries that only this machine has are made in WORK/lib: their whole folder
# on the search path could replace others. Prints the names of those found nowhere.
# shellcheck disable=SC2016  # expanded by what is written
write_launchers() {
  local kit=$GPU_CHECK_KIT work=$GPU_CHECK_WORK name path round
  mkdir -p "$work/lib"
  {
    echo '#!/usr/bin/env bash'
    printf 'export LD_LIBRARY_PATH=%q${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}\n' "$work/lib:$kit/lib"
    if [[ -d $kit/mpi ]]; then
      printf 'export PATH=%q:$PATH OPAL_PREFIX=%q\n' "$kit/mpi/bin" "$kit/mpi"
      printf 'export OPAL_BINDIR=%q OPAL_LIBDIR=%q OPAL_SYSCONFDIR=%q\n' "$kit/mpi/bin" "$kit/lib" "$kit/mpi"
      printf 'export OPAL_PKGLIBDIR=%q OPAL_PKGDATADIR=%q\n' "$kit/mpi/openmpi" "$kit/mpi/share"
      printf 'export PMIX_INSTALL_PREFIX=%q PMIX_LIBDIR=%q PMIX_PKGLIBDIR=%q\n' "$kit/mpi" "$kit/mpi" "$kit/mpi/pmix"
    fi
    # One rank without mpirun needs no daemon of Open MPI, nor the network that starting one would.
    echo 'export OMPI_MCA_ess_singleton_isolated=1'
    echo 'exec "$@"'
  } >"$work/in_kit"
  printf '#!/usr/bin/env bash\nexec %q %q "$@"\n' "$work/in_kit" "$kit/minillm" >"$work/minillm"
  chmod 755 "$work/in_kit" "$work/minillm"
  for round in 1 2 3; do # what is found may need more
    for name in $(missing_libraries); do
      if path=$(find_library "$name"); then
        ln -sfn "$path" "$work/lib/$name"
      elif [[ $name == libnccl.so.2 && -e $kit/no_nccl/$name ]]; then
        ln -sfn "$kit/no_nccl/$name" "$work/lib/$name"
      elif ((round == 3)); then
        echo "$name"
      fi
    done
  done
}

without_nccl() { [[ $(readlink -- "$GPU_CHECK_WORK/lib/libnccl.so.2" 2>/dev/null) == */no_nccl/* ]]; }
needs_nccl() { "$GPU_CHECK_WORK/in_kit" ldd "$1" 2>/dev/null | grep -q 'libnccl\.so'; } # PROGRAM
