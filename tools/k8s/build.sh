#!/bin/bash
# For tests: builds kube-apiserver, controller-manager, scheduler, kubelet and kube-proxy 1.20.2 from Debian's own source package with Debian's Go.
# Needs: bookworm deb-src reachable; root. ~4.5 min on 2 cores, 2.3 GB scratch, no network but apt.
# OUT gets 5 static binaries (~396 MB, 88 MB as tar.zst -10).
set -euo pipefail
OUT=${OUT:-$HOME/.cache/tether-k8s/bin}; W=${W:-$HOME/.cache/tether-k8s/build}
[ -x $OUT/kubelet ] && exit 0
apt-get update -qq
# bookworm: golang-1.19-go is the distro's Go. (trixie host: build inside a `mmdebstrap bookworm` chroot.)
apt-get install -y -qq --no-install-recommends golang-1.19-go golang-github-modern-go-reflect2-dev rsync jq make >/dev/null
mkdir -p $W/apt/{etc/apt/apt.conf.d,etc/apt/sources.list.d,etc/apt/preferences.d,var/lib/apt/lists/partial,var/cache/apt/archives/partial,var/lib/dpkg} $W/src; touch $W/apt/var/lib/dpkg/status
URI=$(awk '/^URIs:/{print $2; exit}' /etc/apt/sources.list.d/debian.sources)
echo "deb-src $URI bookworm main" > $W/apt/etc/apt/sources.list
A="-o Dir=$W/apt -o Dir::Etc::trustedparts=/etc/apt/trusted.gpg.d -o Dir::State::status=$W/apt/var/lib/dpkg/status -o APT::Sandbox::User=root"
apt-get $A update -qq
cd $W/src; apt-get $A source --download-only -qq kubernetes=1.20.5+really1.20.2-1.1+deb12u1
mkdir -p k; tar xzf kubernetes_*.orig.tar.gz -C k --strip-components=1; cd k
# two fixes for Go >= 1.18: (1) reflect2 1.0.1 crashes in map iteration -> Debian's 1.0.2;
rm -f vendor/github.com/modern-go/reflect2/*.go vendor/github.com/modern-go/reflect2/*.s
cp /usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} vendor/github.com/modern-go/reflect2/; rm -f vendor/github.com/modern-go/reflect2/*_test.go
# (2) CRD validation takes "" for null (reflect.Zero now shares storage)
sed -i 's/if data == nil || reflect.DeepEqual(reflect.Zero(reflect.TypeOf(data)), reflect.ValueOf(data)) {/if data == nil {/' vendor/k8s.io/kube-openapi/pkg/validation/validate/type.go
printf "KUBE_GIT_COMMIT='faecb196815e248d3ecfb03c680a4507229c2a56'\nKUBE_GIT_TREE_STATE='clean'\nKUBE_GIT_VERSION='v1.20.2'\nKUBE_GIT_MAJOR='1'\nKUBE_GIT_MINOR='20'\n" > $W/ver.sh
export PATH=/usr/lib/go-1.19/bin:$PATH CGO_ENABLED=0 HOME=$W/home GOPROXY=off GOPATH=$PWD/.go KUBE_GIT_VERSION_FILE=$W/ver.sh
mkdir -p $HOME .go/src/k8s.io; ln -sfn ../../.. .go/src/k8s.io/kubernetes
make WHAT="cmd/kube-apiserver cmd/kube-controller-manager cmd/kube-scheduler cmd/kubelet cmd/kube-proxy" > $W/make.log 2>&1
mkdir -p $OUT; cp _output/local/bin/linux/amd64/{kube-apiserver,kube-controller-manager,kube-scheduler,kubelet,kube-proxy} $OUT/
cc -Os -static -s -DVERSION=local -o $OUT/pause build/pause/linux/pause.c   # 0.7 MB pause
rm -rf "$W"
