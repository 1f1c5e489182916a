package mount

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/mountpoint"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/virtiofs"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/fdstore"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
)

// A kept mount has three descriptors in the store, or four, with the names PREFIX/ID/KIND. A share
// for a virtual machine has state, data and guest.
const (
	keptPrefix = "mount"
	keptState  = "state"  // vfs.State
	keptData   = "data"   // buffers with written data
	keptMemory = "memory" // requests in progress, see kernel.DevFuse.Memory
	keptFuse   = "fuse"   // the connection to the kernel
	keptGuest  = "guest"  // virtiofs.State
)

// A description is what the next process needs to know of a mount, besides its state.
type description struct {
	Spec      string    `json:"spec"`
	Dir       string    `json:"dir"`
	Options   string    `json:"options"`
	Since     time.Time `json:"since"`
	Root      string    `json:"root"`       // file handle of the export, in hexadecimal
	MountPort int       `json:"mount_port"` // TCP port of MOUNT on the server
	Virtiofs  bool      `json:"virtiofs,omitempty"`
}

// A keeper keeps one mount for the next process. A nil keeper keeps nothing.
type keeper struct {
	store   fdstore.Store
	helper  []string
	id      string
	state   *vfs.State
	buffers *membuf.Pool
	guest   *virtiofs.State // nil for a mount of this host, and after an error of virtiofs.Listen
	mounted bool            // the store has the connection
}

func keptName(id, kind string) string { return strings.Join([]string{keptPrefix, id, kind}, "/") }

// parseKeptName is the reverse of keptName.
func parseKeptName(name string) (id, kind string, ok bool) {
	parts := strings.Split(name, "/")
	if len(parts) != 3 || parts[0] != keptPrefix {
		return "", "", false
	}
	return parts[1], parts[2], true
}

// newKeeper makes the state of a new mount and puts it into the store.
func newKeeper(store fdstore.Store, helper []string, d *description, dirtyBytes int) (*keeper, error) {
	var id [4]byte
	var secret [16]byte
	_, _ = rand.Read(id[:]) // never fails
	_, _ = rand.Read(secret[:])
	k := &keeper{store: store, helper: helper, id: hex.EncodeToString(id[:])}
	text, err := json.Marshal(d)
	if err != nil {
		return nil, err
	}
	size, buffers := vfs.BufferPool(int64(dirtyBytes))
	if k.buffers, err = membuf.NewFilePool("nfsrdmad-data", size, buffers); err != nil {
		return nil, err
	}
	if k.state, err = vfs.NewState(text, buffers, secret); err == nil {
		err = k.putState()
	}
	if err != nil {
		k.remove()
		return nil, err
	}
	return k, nil
}

func (k *keeper) putState() error {
	f, err := k.state.Descriptor()
	if err != nil {
		return err
	}
	defer f.Close()
	if err := k.store.Put(keptName(k.id, keptState), f); err != nil {
		return err
	}
	return k.store.Put(keptName(k.id, keptData), k.buffers.File())
}

// putConnection puts the connection of a new mount into the store.
func (k *keeper) putConnection(d *kernel.Device, mem *os.File) error {
	if err := d.UseHelper(k.helper); err != nil {
		return err
	}
	f, err := d.File()
	if err != nil {
		return err
	}
	defer f.Close()
	if mem != nil {
		if err := k.store.Put(keptName(k.id, keptMemory), mem); err != nil {
			return err
		}
	}
	if err := k.store.Put(keptName(k.id, keptFuse), f); err != nil {
		return err
	}
	k.mounted = true
	return nil
}

// putGuest makes the State of a new share and puts it into the store.
func (k *keeper) putGuest() error {
	guest, err := virtiofs.NewState()
	if err != nil {
		return err
	}
	f, err := guest.Descriptor()
	if err == nil {
		defer f.Close()
		err = k.store.Put(keptName(k.id, keptGuest), f)
	}
	if err != nil {
		return errors.Join(err, guest.Close())
	}
	k.guest, k.mounted = guest, true
	return nil
}

// keeps reports whether the next process can continue the mount.
func (k *keeper) keeps() bool { return k != nil && k.mounted }

// errNoStore is why a mount ends with a process that has no store.
var errNoStore = errors.New("the process keeps no mounts")

// notKept returns why the mount of e would end with this process although it is meant to stay; ""
// if it stays, or during its build. The caller holds the lock of the table.
func (t *Table) notKept(e *entry) string {
	err := t.shared.noStore
	if t.shared.store != nil {
		if e.instance != nil {
			err = e.instance.KeepError()
		}
		if err == nil {
			err = t.shared.store.Problem()
		}
	}
	if err == nil || e.instance == nil && e.left == nil {
		return ""
	}
	return control.OneLine(err.Error())
}

// remove ends the keeping of a mount that has ended.
func (k *keeper) remove() {
	if k == nil {
		return
	}
	_ = removeKept(k.store, k.id)
	if k.state != nil {
		_ = k.state.Close()
	}
	if k.buffers != nil {
		k.buffers.Close()
	}
}

// removeKept removes the descriptors of a mount from the store. The connection comes first: what is
// left without it is no mount.
func removeKept(store fdstore.Store, id string) error {
	var errs []error
	for _, kind := range []string{keptFuse, keptGuest, keptMemory, keptData, keptState} {
		errs = append(errs, store.Remove(keptName(id, kind)))
	}
	return errors.Join(errs...)
}

// A leftMount is a mount that an earlier process has left in the store.
type leftMount struct {
	id                            string
	stateFile, dataFile, fuseFile *os.File
	memoryFile                    *os.File // may be nil; open until the mount continues
	guestFile                     *os.File // of a share, which has no fuseFile
	device                        *kernel.Device
	*keeper
	description
	root nfs3.FH
}

// leftMounts returns the mounts in the store. It removes what an earlier process has left of a
// mount that began or ended when the process was killed.
func leftMounts(store fdstore.Store) []*leftMount {
	byID := make(map[string]*leftMount)
	var all []*leftMount
	for _, e := range store.Kept() {
		id, kind, ok := parseKeptName(e.Name)
		if !ok {
			_ = e.File.Close()
			continue
		}
		l := byID[id]
		if l == nil {
			l = &leftMount{id: id}
			byID[id] = l
			all = append(all, l)
		}
		switch kind {
		case keptState:
			l.stateFile = e.File
		case keptData:
			l.dataFile = e.File
		case keptMemory:
			l.memoryFile = e.File
		case keptFuse:
			l.fuseFile = e.File
		case keptGuest:
			l.guestFile = e.File
		default:
			_ = e.File.Close()
		}
	}
	complete := all[:0]
	for _, l := range all {
		if l.stateFile != nil && l.dataFile != nil && (l.fuseFile != nil || l.guestFile != nil) {
			complete = append(complete, l)
			continue
		}
		l.closeFiles()
		l.closeMemory()
		_ = removeKept(store, l.id)
	}
	return complete
}

func (l *leftMount) closeFiles() {
	for _, f := range []*os.File{l.stateFile, l.dataFile, l.fuseFile, l.guestFile} {
		if f != nil {
			_ = f.Close()
		}
	}
}

func (l *leftMount) closeMemory() {
	if l.memoryFile != nil {
		_ = l.memoryFile.Close()
	}
}

// lockTimeout is how long a killed process may take to exit.
const lockTimeout = 30 * time.Second

// open opens the state of the mount. It waits for the end of the process that served the mount. An
// error means that the mount cannot be continued.
func (l *leftMount) open(ctx context.Context, common *shared) (err error) {
	defer l.closeFiles()
	defer func() {
		if err != nil {
			l.closeMemory()
		}
	}()
	k := &keeper{store: common.store, helper: common.helper, id: l.id, mounted: true}
	if k.state, err = openLocked(ctx, l.stateFile, vfs.OpenState); err != nil {
		if l.fuseFile != nil {
			l.Dir = mountpoint.Of(l.fuseFile)
		} else {
			l.Dir = virtiofs.SocketOf(l.guestFile)
		}
		return err
	}
	defer func() {
		if err != nil {
			_ = k.state.Close()
		}
	}()
	if err := json.Unmarshal(k.state.Description(), &l.description); err != nil {
		return fmt.Errorf("description of the mount: %w", err)
	}
	root, err := hex.DecodeString(l.Root)
	if err == nil {
		l.root, err = nfs3.NewFH(root)
	}
	if err != nil {
		return fmt.Errorf("handle of the export: %w", err)
	}
	size, _ := vfs.BufferPool(0)
	if k.buffers, err = membuf.OpenFilePool(l.dataFile, size, k.state.Buffers()); err != nil {
		return err
	}
	if l.guestFile != nil {
		k.guest, err = openLocked(ctx, l.guestFile, virtiofs.OpenState)
	} else {
		l.device, err = kernel.DeviceOf(l.fuseFile)
	}
	if err != nil {
		k.buffers.Close()
		return err
	}
	if l.keeper = k; l.guestFile != nil {
		return nil
	}
	if err := l.device.UseHelper(common.helper); err != nil {
		common.log.Warn("a killed daemon may not exit: notifications of a mount have no helper process", "dir", l.Dir,
			"reason", err)
	}
	return nil
}

// isAttached reports whether the mount point is in use: a mount may have been detached while files
// were open, and the socket of a share removed while a virtual machine used it.
func (l *leftMount) isAttached(dir string) bool {
	if l.guest != nil {
		return l.guest.Listening()
	}
	return l.state.IsMountedAt(dir)
}

// discard ends the mount without the server.
func (l *leftMount) discard(dir string) error {
	if l.guest != nil {
		return errors.Join(l.guest.Discard(dir), l.guest.Close())
	}
	return vfs.Discard(dir, l.device, l.state)
}

// advice tells what to do with a mount that this daemon cannot serve.
func (l *leftMount) advice() string {
	if l.guestFile != nil {
		return "use the version that made it, or end it with umount --force"
	}
	return "use the version that made it, or umount -l"
}

// openLocked opens a state with open, which returns slotfile.ErrLocked while the earlier process
// has not ended.
func openLocked[S any](ctx context.Context, f *os.File, open func(*os.File) (S, error)) (S, error) {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	for {
		s, err := open(f)
		if !errors.Is(err, slotfile.ErrLocked) {
			return s, err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return s, fmt.Errorf("the process that served the mount does not exit: %w", err)
		}
	}
}
