package knfsd

import (
	"path/filepath"
	"testing"
	"time"
)

var _ = register("throughput", "256 MiB in and out (64 with rdmacore)", testThroughput)

// testThroughput tells how fast a large file goes in and out, for comparison between runs:
// emulation is slow, and nothing is asserted but the data.
func testThroughput(t *testing.T, b bench) {
	mib := b.smaller(256, 64)
	file := randomFile(t, mib<<20)
	m := b.mount(t, nil)
	begin := time.Now()
	run(t, "", "dd", "if="+file, "of="+filepath.Join(m.dir, "big"), "bs=1M", "conv=fsync", "status=none")
	wrote := time.Since(begin)
	cold := b.mount(t, nil)
	begin = time.Now()
	run(t, "", "cmp", file, filepath.Join(cold.dir, "big"))
	t.Logf("throughput of %d MiB: write %.1f MiB/s, read %.1f MiB/s", mib, float64(mib)/wrote.Seconds(),
		float64(mib)/time.Since(begin).Seconds())
}
