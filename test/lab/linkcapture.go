package lab

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"
)

// captureLink records what the guest sends and receives on its link. QEMU writes the file, with the
// object filter-dump, so no frame is missing. The record has the frames that a cut link then loses.
// A guest that loses its power ends the capture, and Stop then returns an error.
func (g *Guest) captureLink(t testing.TB, name string) *Capture {
	t.Helper()
	m, err := g.running()
	if err != nil {
		t.Fatal(err)
	}
	c := &Capture{File: filepath.Join(t.ArtifactDir(), name+".pcap")}
	id := fmt.Sprintf("capture%d", g.captures.Add(1))
	if err := m.qmp.do("object-add", map[string]any{"qom-type": "filter-dump", "id": id, "netdev": linkNetdev,
		"file": c.File, "maxlen": maxFrame}); err != nil {
		t.Fatalf("guest %s: start capture %s: %v", g.opts.Name, name, err)
	}
	c.stop = func() error {
		time.Sleep(captureSettle)
		if err := m.qmp.do("object-del", map[string]any{"id": id}); err != nil {
			return fmt.Errorf("guest %s: stop capture %s: %w", g.opts.Name, name, err)
		}
		return nil
	}
	t.Cleanup(func() { c.Stop() })
	return c
}
