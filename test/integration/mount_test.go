package integration

import (
	"path/filepath"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
)

// TestGanesha runs real programs on a mount of NFS-Ganesha.
func TestGanesha(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	g := ganesha.Start(t, t.TempDir())
	front := serve(t, nfsserve.Config{Backend: g.Addr()})
	export := mountd.Args{Host: g.Host, Port: g.MountPort, Export: g.Export}

	t.Run("tree in and out", func(t *testing.T) {
		src := goTree(t, "cmd")
		more := goTree(t, "runtime")
		if n := countFiles(t, src) + countFiles(t, more); n < 5000 {
			t.Fatalf("got a tree of %d files, want at least 5000", n)
		}
		m := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: export})
		run(t, "", "cp", "-a", src, more, m.dir)
		cold := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: export})
		out := t.TempDir()
		run(t, cold.dir, "tar", "-cf", filepath.Join(out, "tree.tar"), ".")
		run(t, out, "tar", "-xf", "tree.tar")
		run(t, "", "diff", "-r", "--no-dereference", src, filepath.Join(out, "cmd"))
		run(t, "", "diff", "-r", "--no-dereference", more, filepath.Join(out, "runtime"))
		run(t, "", "rsync", "-a", "--checksum", "--delete", cold.dir+"/runtime/", filepath.Join(out, "again"))
		run(t, "", "diff", "-r", more, filepath.Join(out, "again"))
		run(t, m.dir, "rm", "-rf", "cmd", "runtime")
		checkTransports(t, m.tr.Stats(), cold.tr.Stats())
	})

	t.Run("git", func(t *testing.T) {
		m := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: export})
		origin := t.TempDir()
		run(t, "", "cp", "-a", goTree(t, "net"), origin+"/net")
		run(t, origin, "git", "init", "-q")
		run(t, origin, "git", "add", ".")
		run(t, origin, "git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qm", "tree")
		run(t, m.dir, "git", "clone", "-q", "--no-hardlinks", origin, "clone")
		clone := filepath.Join(m.dir, "clone")
		run(t, clone, "git", "fsck", "--strict")
		run(t, clone, "git", "gc", "-q")
		if out := run(t, clone, "git", "status", "--porcelain"); out != "" {
			t.Errorf("git status in a new clone: got\n%s, want nothing", out)
		}
		run(t, m.dir, "rm", "-rf", "clone")
	})

	t.Run("programs", func(t *testing.T) {
		m := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: export})
		run(t, m.dir, "sh", "-ec", `
			echo one > f; echo two >> f; test "$(cat f)" = "$(printf 'one\ntwo')"
			ln f hard; ln -s f soft; test "$(cat soft)" = "$(cat hard)"; test "$(stat -c %h f)" = 2
			mv f g; truncate -s 3 g; test "$(cat hard)" = one
			chmod 640 g; test "$(stat -c %a g)" = 640
			chown 12:34 g; test "$(stat -c %u:%g g)" = 12:34
			touch -d 2001-02-03T04:05:06Z g; test "$(stat -c %Y g)" = 981173106
			mknod p p; test -p p; mkdir d; rmdir d; df . >/dev/null
			dd if=/dev/urandom of=big bs=1M count=40 status=none conv=fsync; cp big big2; cmp big big2
			dd if=big of=big2 bs=1000001 conv=notrunc status=none; cmp big big2
			test "$(find . -type f | wc -l)" = 4; rm -rf ./*; test -z "$(ls -A)"`)
	})
}

// TestEmbedded copies a tree to a mount of the embedded server and compares it.
func TestEmbedded(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	front := serve(t, nfsserve.Config{Dir: t.TempDir(), TCPListen: "127.0.0.1:0"})
	m := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: embedded(t, front)})
	src := goTree(t, "net")
	run(t, "", "cp", "-a", src, m.dir)
	cold := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: embedded(t, front)})
	run(t, "", "diff", "-r", src, filepath.Join(cold.dir, "net"))
	checkTransports(t, m.tr.Stats(), cold.tr.Stats())
}
