package csi

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// Parameters of a StorageClass, and attributes of a PersistentVolume. Case is ignored, as in
// csi-driver-nfs.
const (
	paramServer           = "server"
	paramShare            = "share"
	paramSubDir           = "subdir"
	paramMountOptions     = "mountoptions"
	paramMountPermissions = "mountpermissions"
	paramOnDelete         = "ondelete"
)

// known are the names of all parameters.
var known = []string{paramServer, paramShare, paramSubDir, paramMountOptions, paramMountPermissions, paramOnDelete}

// Metadata that external-provisioner adds with --extra-create-metadata.
const (
	paramPVCName      = "csi.storage.k8s.io/pvc/name"
	paramPVCNamespace = "csi.storage.k8s.io/pvc/namespace"
	paramPVName       = "csi.storage.k8s.io/pv/name"
)

// What DeleteVolume does with the directory of a volume.
const (
	onDeleteDelete  = "delete"
	onDeleteRetain  = "retain"
	onDeleteArchive = "archive"
)

const (
	idSeparator = "#"
	idFields    = 5
	// maxName and maxPath bound names on a server, in bytes: NAME_MAX of Linux, and MNTPATHLEN of
	// RFC 1813 §5.1.4.
	maxName, maxPath = 255, 1024
)

// A volume is a directory of an export.
type volume struct {
	share  mount.Spec // the export
	subDir string     // directory in the export, without leading slash; "" for the export itself
	// unique tells volumes apart that share a directory; "" if subDir does.
	unique      string
	onDelete    string // "" for the default of the driver
	options     string // the value of -o
	permissions uint32 // mode bits of the directory; 0 to leave them
}

// spec returns the mount source of the volume.
func (v *volume) spec() mount.Spec {
	return mount.Spec{Host: v.share.Host, Export: path.Join(v.share.Export, v.subDir)}
}

// id returns the volume ID. csi-driver-nfs has the same format:
// SERVER#SHARE#SUBDIR#UNIQUE#ONDELETE, where SHARE has no leading slash.
func (v *volume) id() string {
	return strings.Join([]string{v.share.Host, strings.TrimPrefix(v.share.Export, "/"), v.subDir, v.unique, v.onDelete},
		idSeparator)
}

// parseID parses the ID of a provisioned volume. It accepts only what [volume.id] returns.
func parseID(id string) (*volume, error) {
	bad := func(cause any) error { return fmt.Errorf("volume ID %q: %v", brief(id), cause) }
	f := strings.Split(id, idSeparator)
	if len(f) != idFields {
		return nil, bad("not SERVER#SHARE#SUBDIR#UNIQUE#ONDELETE")
	}
	share, err := parseShare(f[0], "/"+f[1])
	if err != nil {
		return nil, bad(err)
	}
	if f[2] == "" {
		return nil, bad("no directory")
	}
	if err := checkSubDir(f[2]); err != nil {
		return nil, bad(err)
	}
	if f[3] != "" {
		if err := checkName(f[3]); err != nil {
			return nil, bad(err)
		}
	}
	if f[4] != "" {
		if err := checkOnDelete(f[4]); err != nil {
			return nil, bad(err)
		}
	}
	v := &volume{share: share, subDir: f[2], unique: f[3], onDelete: f[4]}
	if v.id() != id {
		return nil, bad("not in the form that this driver writes")
	}
	return v, nil
}

// parseShare checks a server and an export.
func parseShare(server, export string) (mount.Spec, error) {
	if server == "" {
		return mount.Spec{}, fmt.Errorf("missing %s", paramServer)
	}
	if export == "" {
		return mount.Spec{}, fmt.Errorf("missing %s", paramShare)
	}
	if strings.HasPrefix(server, "[") && strings.HasSuffix(server, "]") {
		server = server[1 : len(server)-1]
	}
	s, err := mount.ParseSpec(mount.Spec{Host: server, Export: export}.String())
	switch {
	case err != nil:
		return s, err
	case s.Host != server || strings.ContainsAny(server, idSeparator+"[]\x00"):
		return s, fmt.Errorf("%s %q: invalid name or address", paramServer, brief(server))
	}
	if s.Export != "/" {
		s.Export = strings.TrimSuffix(s.Export, "/")
		if err := checkSubDir(s.Export[1:]); err != nil {
			return s, fmt.Errorf("%s %q: %w", paramShare, brief(export), err)
		}
	}
	return s, nil
}

// checkSubDir refuses all paths but those of names separated by single slashes.
func checkSubDir(dir string) error {
	if len(dir) > maxPath {
		return fmt.Errorf("path longer than %d bytes", maxPath)
	}
	for name := range strings.SplitSeq(dir, "/") {
		if err := checkName(name); err != nil {
			return fmt.Errorf("directory %q: %w", brief(dir), err)
		}
	}
	return nil
}

// checkName refuses names that are not the name of one directory.
func checkName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("empty name; use names separated by single slashes, without a slash at the start or end")
	case name == "." || name == "..":
		return fmt.Errorf("name %q is not allowed", name)
	case len(name) > maxName:
		return fmt.Errorf("name longer than %d bytes", maxName)
	case strings.Contains(name, "${"):
		return fmt.Errorf("unknown variable in %q; use ${pvc.metadata.name}, ${pvc.metadata.namespace} or "+
			"${pv.metadata.name}, and run external-provisioner with --extra-create-metadata", brief(name))
	case brief(name) != control.Brief(name) || strings.ContainsAny(name, "/"+idSeparator):
		return fmt.Errorf("name %q has a character that is not allowed", brief(name))
	}
	return nil
}

func checkOnDelete(s string) error {
	switch s {
	case onDeleteDelete, onDeleteRetain, onDeleteArchive:
		return nil
	}
	return fmt.Errorf("onDelete %q: must be delete, retain or archive", brief(s))
}

// parsePermissions parses octal mode bits.
func parsePermissions(s string) (uint32, error) {
	v, err := strconv.ParseUint(s, 8, 32)
	if err != nil || v > 0o7777 {
		return 0, fmt.Errorf("mountPermissions %q: must be octal mode bits such as 0777", brief(s))
	}
	return uint32(v), nil
}

// parameters are parameters with names in lower case.
type parameters map[string]string

// lower returns p with names in lower case. It refuses unknown names, and names that differ in case
// only. Names with a slash are those of Kubernetes.
func lower(p map[string]string) (parameters, error) {
	out := make(parameters, len(p))
	for k, v := range p {
		name := strings.ToLower(k)
		if _, twice := out[name]; twice {
			return nil, fmt.Errorf("parameter %q: given twice", brief(k))
		}
		if !strings.Contains(name, "/") && !slices.Contains(known, name) {
			return nil, fmt.Errorf("parameter %q: unknown; see docs/kubernetes.md", brief(k))
		}
		out[name] = v
	}
	return out, nil
}

// volume returns the volume with the parameters p, except for subDir and onDelete.
func (p parameters) volume() (v *volume, err error) {
	v = &volume{options: p[paramMountOptions]}
	if v.share, err = parseShare(p[paramServer], p[paramShare]); err != nil {
		return nil, err
	}
	if s := p[paramMountPermissions]; s != "" {
		if v.permissions, err = parsePermissions(s); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// newVolume returns the volume that CreateVolume must create for a name and the parameters of a
// StorageClass.
func newVolume(name string, params map[string]string) (*volume, error) {
	p, err := lower(params)
	if err != nil {
		return nil, err
	}
	v, err := p.volume()
	if err != nil {
		return nil, err
	}
	if v.onDelete = strings.ToLower(p[paramOnDelete]); v.onDelete != "" {
		if err := checkOnDelete(v.onDelete); err != nil {
			return nil, err
		}
	}
	if err := checkName(name); err != nil {
		return nil, fmt.Errorf("volume name: %w", err)
	}
	v.subDir = name
	if template := p[paramSubDir]; template != "" {
		v.unique = name
		if v.subDir, err = p.expand(template); err != nil {
			return nil, fmt.Errorf("subDir: %w", err)
		}
	}
	if err := checkSubDir(v.subDir); err != nil {
		return nil, fmt.Errorf("subDir: %w", err)
	}
	return v, nil
}

// expand replaces the variables of a template. A value must be one name.
func (p parameters) expand(template string) (string, error) {
	for variable, param := range map[string]string{"${pvc.metadata.name}": paramPVCName,
		"${pvc.metadata.namespace}": paramPVCNamespace, "${pv.metadata.name}": paramPVName} {
		value := p[param]
		if !strings.Contains(template, variable) || value == "" {
			continue
		}
		if err := checkName(value); err != nil {
			return "", err
		}
		template = strings.ReplaceAll(template, variable, value)
	}
	return template, nil
}

// context returns the attributes from which [volumeOf] makes the volume again.
func (v *volume) context() map[string]string {
	c := map[string]string{paramServer: v.share.Host, paramShare: v.share.Export, "subDir": v.subDir}
	if v.options != "" {
		c["mountOptions"] = v.options
	}
	if v.permissions != 0 {
		c["mountPermissions"] = fmt.Sprintf("%04o", v.permissions)
	}
	return c
}

// volumeOf returns the volume with the given attributes: those of [volume.context], or those of a
// PersistentVolume that a user has written.
func volumeOf(attributes map[string]string) (*volume, error) {
	p, err := lower(attributes)
	if err != nil {
		return nil, err
	}
	v, err := p.volume()
	if err != nil {
		return nil, err
	}
	if v.subDir = p[paramSubDir]; v.subDir != "" {
		if err := checkSubDir(v.subDir); err != nil {
			return nil, fmt.Errorf("subDir: %w", err)
		}
	}
	return v, nil
}

// joinOptions joins lists of mount options.
func joinOptions(lists ...string) string {
	var all []string
	for _, l := range lists {
		if l != "" {
			all = append(all, l)
		}
	}
	return strings.Join(all, ",")
}

// flagsOf returns the mount options of a capability.
func flagsOf(c *csi.VolumeCapability) string {
	return joinOptions(c.GetMount().GetMountFlags()...)
}

// checkCapability refuses what a directory of an NFS server cannot be.
func checkCapability(c *csi.VolumeCapability) error {
	switch {
	case c == nil:
		return invalid("missing volume capability")
	case c.GetBlock() != nil:
		return invalid("volume capability: block volumes are not supported; use volumeMode Filesystem")
	case c.GetMount() == nil:
		return invalid("volume capability: missing access type")
	case c.GetMount().GetVolumeMountGroup() != "":
		return invalid("volume capability: volume_mount_group is not supported")
	}
	if t := c.GetMount().GetFsType(); t != "" && t != "nfs" && t != "nfsrdma" {
		return invalid("volume capability: fsType %q is not supported; remove it, or use nfsrdma", brief(t))
	}
	mode := c.GetAccessMode().GetMode()
	if _, known := csi.VolumeCapability_AccessMode_Mode_name[int32(mode)]; !known ||
		mode == csi.VolumeCapability_AccessMode_UNKNOWN {
		return invalid("volume capability: unknown access mode %d", mode)
	}
	return nil
}

func checkCapabilities(all []*csi.VolumeCapability) error {
	if len(all) == 0 {
		return invalid("missing volume capabilities")
	}
	for _, c := range all {
		if err := checkCapability(c); err != nil {
			return err
		}
	}
	return nil
}

// isReader reports whether a capability allows no writes.
func isReader(c *csi.VolumeCapability) bool {
	mode := c.GetAccessMode().GetMode()
	return mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY ||
		mode == csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
}
