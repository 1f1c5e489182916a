package doctor

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

const (
	// scratchPrefix begins the name of a scratch file; a random part follows.
	scratchPrefix = ".nfsrdmad-doctor-scratch-"
	// scratchBytes is the size of the scratch file, and of its WRITE and READ.
	scratchBytes = 64 << 10
)

// readWrite writes a scratch file, reads it back, and removes it.
func (s *server) readWrite(ctx context.Context) (f finding) {
	switch {
	case !s.cfg.Write:
		return skip("not requested; --write tries it with a scratch file in the root of the export")
	case s.cfg.Options.ReadOnly:
		return skip("the mount options say ro")
	}
	name := scratchPrefix + rand.Text()
	var created nfs3.CreateResult
	err := s.client.Create(ctx, s.cred, s.root, name, &nfs3.CreateHow{Mode: nfs3.Guarded,
		Attr: nfs3.SetAttr{HasMode: true, Mode: 0o600}}, &created)
	var refused *nfs3.Error
	if !errors.As(err, &refused) { // without an answer the server may have the file
		defer func() { f = s.removeScratch(name, f) }()
	}
	if err != nil {
		return s.writeFailed("create "+name, err)
	}
	fh := created.FH
	if !created.HasFH {
		var found nfs3.LookupResult
		if err := s.client.Lookup(ctx, s.cred, s.root, name, &found); err != nil {
			return s.writeFailed("look up "+name, err)
		}
		fh = found.FH
	}
	if err := s.writeAndCompare(ctx, fh); err != nil {
		return s.writeFailed(name, err)
	}
	return ok("wrote and read %d bytes, and removed the scratch file", scratchBytes)
}

func (s *server) writeAndCompare(ctx context.Context, fh nfs3.FH) error {
	arena, err := membuf.Alloc(2 * scratchBytes) // a device reaches no other memory
	if err != nil {
		return err
	}
	defer membuf.Free(arena)
	data, back := arena[:scratchBytes:scratchBytes], arena[scratchBytes:]
	rand.Read(data) // never fails
	for off := 0; off < len(data); {
		var res nfs3.WriteResult
		if err := s.client.Write(ctx, s.cred, fh, uint64(off), data[off:], nfs3.FileSync, &res); err != nil {
			return err
		}
		off += int(res.Count) // above 0
	}
	for off := 0; off < len(back); {
		var res nfs3.ReadResult
		if err := s.client.Read(ctx, s.cred, fh, uint64(off), back[off:], &res); err != nil {
			return err
		}
		if off += res.N; res.N == 0 {
			return fmt.Errorf("the server returned %d of %d bytes", off, len(back))
		}
	}
	if !bytes.Equal(data, back) {
		return errors.New("the server returned other data than was written")
	}
	return nil
}

func (s *server) writeFailed(what string, err error) finding {
	remedy := "see the log of the server"
	switch nfs3.Errno(err) {
	case syscall.EACCES, syscall.EPERM:
		remedy = "run the command as a user that may write there; an export with root_squash refuses root"
	case syscall.EROFS:
		remedy = "export the directory read-write, or mount it with ro"
	case syscall.ENOSPC, syscall.EDQUOT:
		remedy = "free space in the export"
	}
	return s.callFailed(fmt.Errorf("%s: %w", what, err), remedy)
}

// removeScratch removes the scratch file, also when the diagnosis was interrupted. A file that it
// cannot remove is a failure.
func (s *server) removeScratch(name string, f finding) finding {
	ctx, cancel := context.WithTimeout(context.Background(), undoTimeout)
	defer cancel()
	err := s.client.Remove(ctx, s.cred, s.root, name, &nfs3.WccData{})
	if err == nil || errors.Is(err, syscall.ENOENT) {
		return f
	}
	left := fmt.Errorf("the scratch file %s in the root of the export was not removed: %w", name, err)
	if f.result == Failed {
		left = fmt.Errorf("%s; %w", f.text, left)
	}
	return finding{result: Failed, text: left.Error(), remedy: "remove the file", lasting: true}
}
