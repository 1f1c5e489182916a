package knfsd

import (
	"path/filepath"
	"testing"
	"time"
)

var _ = register("throughput", "256 MiB written and read (64 with rdmacore)", testThroughput)

// testThroughput logs how fast a large file is written and read, to compare runs. Emulation is
// slow, so it checks only the data.
func testThroughput(t *testing.T, b bench) {
	mib := b.scaled(256, 64)
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
