package knfsd

import (
	"path/filepath"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var _ = register("small blocks", "READs and WRITEs limited to 64 KiB by the server", testSmallBlocks)

// testSmallBlocks uses a server with little memory, which allows only small READs and WRITEs. A
// mount must respect FSINFO, because a server may answer larger requests with ERR_CHUNK.
func testSmallBlocks(t *testing.T, b bench) {
	const block = 64 << 10
	b = b.ownServer(lab.Options{MaxBlock: block, MemoryMiB: 512, CPUs: 1})
	var info nfs3.FSInfoResult
	s := b.session(t, nil)
	if err := s.FSInfo(t.Context(), s.cred, s.root, &info); err != nil || info.ReadMax != block ||
		info.WriteMax != block {
		t.Fatalf("FSINFO: got %d and %d bytes, error %v", info.ReadMax, info.WriteMax, err)
	}
	const size = 4<<20 + 5
	file := randomFile(t, size)
	var m *mount
	c := b.record(t, "blocks", func() {
		m = b.mount(t, nil)
		run(t, "", "cp", file, filepath.Join(m.dir, "file"))
		if got, want := b.serverSum(t, "file"), sum(t, file); got != want {
			t.Errorf("got a file with sum %s on the server, want %s", got, want)
		}
		run(t, "", "cmp", file, filepath.Join(b.mount(t, nil).dir, "file"))
	})
	b.checkCapture(t, c)
	for _, f := range frames(t, c, b.wire().to+"rpcordma.reply_count == 0 && rpcordma.rdma_length",
		"rpcordma.rdma_length") {
		for _, length := range f[0] {
			if number(t, length) > block {
				t.Errorf("got a chunk of %s bytes, want at most %d", length, block)
			}
		}
	}
	if st := m.tr.Stats(); st.ReadChunks < size/block || st.RDMAErrors != 0 {
		t.Errorf("got %d read chunks and %d RDMA errors", st.ReadChunks, st.RDMAErrors)
	}
}
