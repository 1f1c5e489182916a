package mounts

import (
	"context"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/mountpoint"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
)

// closeTimeout bounds the calls of FS.Close on a busy host.
const closeTimeout = 30 * time.Second

// Mount mounts fs on a new directory, which it returns, until the test ends. Then it closes fs.
// source is the name of the file system in the mount table.
func Mount(t testing.TB, fs *vfs.FS, source string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	srv, err := vfs.Mount(dir, fs, vfs.MountOptions{Options: mountpoint.Options{Source: source}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := srv.Unmount(); err != nil {
			t.Errorf("unmount: %v", err)
			srv.ForceUnmount()
		}
		srv.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		fs.Close(ctx)
	})
	return dir
}
