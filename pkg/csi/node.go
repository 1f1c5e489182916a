package csi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// NodeGetInfo returns the name of the node.
func (d *Driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.cfg.NodeID}, nil
}

// NodeGetCapabilities returns the calls of the service.
func (d *Driver) NodeGetCapabilities(context.Context,
	*csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	r := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
	} {
		r.Capabilities = append(r.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}}})
	}
	return r, nil
}

// NodeStageVolume mounts a volume at its staging path.
func (d *Driver) NodeStageVolume(ctx context.Context,
	r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	err := d.change("stage volume", r.GetVolumeId(), "staging path", r.GetStagingTargetPath(), func() error {
		_, err := d.stage(ctx, r)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// change checks the arguments of a call that mounts or unmounts a volume, and calls f with the lock
// of the volume. The error of f gets the operation and the volume.
func (d *Driver) change(operation, id, what, path string, f func() error) error {
	release, err := d.lock(id)
	if err != nil {
		return err
	}
	defer release()
	if err := checkPath(what, path); err != nil {
		return err
	}
	return rpcError(describe(operation, id), f())
}

// A stageRequest is a request that names a staging path.
type stageRequest interface {
	GetStagingTargetPath() string
	GetVolumeCapability() *csi.VolumeCapability
	GetVolumeContext() map[string]string
}

// stage mounts a volume at its staging path, unless it is mounted there, and returns the path. It
// replaces a mount whose daemon has ended. The caller has the lock of the volume.
func (d *Driver) stage(ctx context.Context, r stageRequest) (dir string, err error) {
	if err := checkPath("staging path", r.GetStagingTargetPath()); err != nil {
		return "", err
	}
	if err := checkCapability(r.GetVolumeCapability()); err != nil {
		return "", err
	}
	v, err := volumeOf(r.GetVolumeContext())
	if err != nil {
		return "", invalid("volume attributes: %v", err)
	}
	if dir, err = mount.ResolveMountPoint(ctx, r.GetStagingTargetPath()); err != nil {
		return "", err
	}
	staged, err := d.isStaged(ctx, dir, v)
	if err != nil || staged {
		return dir, err
	}
	if err := makeTarget(dir); err != nil {
		return "", err
	}
	options := joinOptions(flagsOf(r.GetVolumeCapability()), v.options)
	_, err = d.client.Mount(ctx, control.MountRequest{Spec: v.spec().String(), Dir: dir, Options: options})
	if err != nil {
		return "", err
	}
	if v.permissions == 0 || isReader(r.GetVolumeCapability()) {
		return dir, nil
	}
	if err := d.setRootMode(ctx, dir, v.permissions); err != nil {
		if failed := d.client.Umount(context.WithoutCancel(ctx), control.UmountRequest{Dir: dir}); failed != nil {
			d.log.Warn("unmount after a failed stage failed", "dir", dir, "error", failed)
		}
		return "", err
	}
	return dir, nil
}

// isStaged reports whether the daemon has mounted v at dir. It removes a mount whose daemon has
// ended.
func (d *Driver) isStaged(ctx context.Context, dir string, v *volume) (bool, error) {
	m, err := d.mountAt(ctx, dir)
	if err != nil {
		return false, err
	}
	if m != nil {
		switch m.State {
		case control.StateMounting, control.StateUnmounting:
			return false, status.Errorf(codes.Aborted, "%s is %s; try again later", dir, m.State)
		case control.StateKept, control.StateFailed:
			return false, status.Errorf(codes.Internal, "%s is %s: %s%s; remove it with nfsrdmad umount --force", dir,
				m.State, m.Reason, m.Failure)
		}
		if m.Spec != v.spec().String() {
			return false, status.Errorf(codes.AlreadyExists, "%s has %s mounted instead of %s; unstage it first", dir,
				m.Spec, v.spec())
		}
		return true, nil
	}
	top, err := topMount(dir)
	switch {
	case err != nil || top == nil:
		return false, err
	case !top.isOurs():
		return false, status.Errorf(codes.Internal, "%s has a file system of type %s; unmount it first", dir,
			top.fsType)
	case !d.isDead(ctx, dir):
		return false, status.Errorf(codes.Internal, "%s is a mount of another daemon; unmount it first", dir)
	}
	d.log.Warn("removing a mount whose daemon has ended; pods that use it must be restarted", "dir", dir)
	return false, unmountAll(dir, unix.MNT_DETACH)
}

// mountAt returns the mount of the daemon at dir, or nil.
func (d *Driver) mountAt(ctx context.Context, dir string) (*control.MountInfo, error) {
	l, err := d.client.List(ctx)
	if err != nil {
		return nil, err
	}
	for i := range l {
		if l[i].Dir == dir {
			return &l[i], nil
		}
	}
	return nil, nil
}

// setRootMode sets the mode bits of the root directory of a mount. It gives up when ctx ends: then
// the goroutine ends when the server replies, or with the mount.
func (d *Driver) setRootMode(ctx context.Context, dir string, mode uint32) error {
	done := make(chan error, 1)
	go func() {
		fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			done <- fmt.Errorf("open %s: %w", dir, err)
			return
		}
		err = setMode(fd, mode)
		unix.Close(fd)
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// NodeUnstageVolume unmounts a volume from its staging path. It writes all data first. If the
// server does not accept the data, the call fails, and the mount stays.
func (d *Driver) NodeUnstageVolume(ctx context.Context,
	r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	err := d.change("unstage volume", r.GetVolumeId(), "staging path", r.GetStagingTargetPath(), func() error {
		return d.unstage(ctx, r.GetStagingTargetPath())
	})
	if err != nil {
		return nil, err
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

func (d *Driver) unstage(ctx context.Context, path string) error {
	dir, err := mount.ResolveMountPoint(ctx, path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	top, err := topMount(dir)
	if err != nil {
		return err
	}
	if top != nil {
		// The daemon would end the bind mounts with the mount.
		if others, err := mountsOf(top.device, dir); err != nil || len(others) > 0 {
			return cmp.Or(err, status.Errorf(codes.FailedPrecondition, "%s is published at %v; unpublish it first",
				dir, others))
		}
	}
	m, err := d.mountAt(ctx, dir)
	switch {
	case err != nil:
		return err
	case m != nil:
		return d.client.Umount(ctx, control.UmountRequest{Dir: dir})
	case top == nil:
		return nil
	case !top.isOurs() || !d.isDead(ctx, dir):
		return fmt.Errorf("%s is a mount of another program; unmount it first", dir)
	}
	return unmountAll(dir, unix.MNT_DETACH)
}

// NodePublishVolume bind mounts the staging path of a volume at a target path. It stages the volume
// again if the daemon of the mount has ended.
func (d *Driver) NodePublishVolume(ctx context.Context,
	r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	err := d.change("publish volume", r.GetVolumeId(), "target path", r.GetTargetPath(), func() error {
		return d.publish(ctx, r)
	})
	if err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

func (d *Driver) publish(ctx context.Context, r *csi.NodePublishVolumeRequest) error {
	staging, err := d.stage(ctx, r)
	if err != nil {
		return err
	}
	staged, err := topMount(staging)
	if err != nil {
		return err
	}
	if staged == nil {
		return status.Errorf(codes.Internal, "the daemon has mounted %s, but this mount namespace does not see it; "+
			"mount the directory of kubelet with Bidirectional propagation in both containers", staging)
	}
	target, err := mount.ResolveMountPoint(ctx, r.GetTargetPath())
	if err != nil {
		return err
	}
	readOnly := r.GetReadonly() || isReader(r.GetVolumeCapability())
	done, err := d.isPublished(ctx, target, staged.device, readOnly)
	if err != nil || done {
		return err
	}
	mode := r.GetVolumeCapability().GetAccessMode().GetMode()
	if mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER {
		if others, err := mountsOf(staged.device, staging, target); err != nil || len(others) > 0 {
			return cmp.Or(err, status.Errorf(codes.FailedPrecondition,
				"the volume has access mode SINGLE_NODE_SINGLE_WRITER and is published at %v", others))
		}
	}
	if err := makeTarget(target); err != nil {
		return err
	}
	return bind(staging, target, readOnly)
}

// isPublished reports whether the file system dev is mounted at target. It removes a mount whose
// daemon has ended.
func (d *Driver) isPublished(ctx context.Context, target string, dev device, readOnly bool) (bool, error) {
	m, err := topMount(target)
	switch {
	case err != nil || m == nil:
		return false, err
	case m.device == dev && m.readOnly == readOnly:
		return true, nil
	case m.device == dev:
		return false, status.Errorf(codes.AlreadyExists, "%s: already published with readonly=%v", target, m.readOnly)
	case !m.isOurs() || !d.isDead(ctx, target):
		return false, status.Errorf(codes.AlreadyExists, "%s: another file system of type %s is mounted there", target,
			m.fsType)
	}
	return false, unmountAll(target, unix.MNT_DETACH)
}

// NodeUnpublishVolume unmounts a volume from a target path, and removes the directory.
func (d *Driver) NodeUnpublishVolume(ctx context.Context,
	r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	err := d.change("unpublish volume", r.GetVolumeId(), "target path", r.GetTargetPath(), func() error {
		return unpublish(ctx, r.GetTargetPath())
	})
	if err != nil {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func unpublish(ctx context.Context, path string) error {
	target, err := mount.ResolveMountPoint(ctx, path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	if err := unmountAll(target, 0); err != nil {
		return err
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// publishedAt returns the mount at a path of a request.
func publishedAt(ctx context.Context, id, path string) (*mountPoint, error) {
	if err := cmp.Or(checkGiven("volume ID", id), checkGiven("volume path", path)); err != nil {
		return nil, err
	}
	dir, err := mount.ResolveMountPoint(ctx, path)
	var m *mountPoint
	if err == nil {
		m, err = topMount(dir)
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return nil, rpcError(describe("volume", id), err)
	}
	if m == nil || !m.isOurs() {
		return nil, status.Errorf(codes.NotFound, "volume %s: not mounted at %s", brief(id), brief(path))
	}
	return m, nil
}

// NodeGetVolumeStats returns the space of the file system on the server. If the server does not
// reply, the call fails after a few seconds.
func (d *Driver) NodeGetVolumeStats(ctx context.Context,
	r *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	m, err := publishedAt(ctx, r.GetVolumeId(), r.GetVolumePath())
	if err != nil {
		return nil, err
	}
	st, err := d.prober.statfs(ctx, probeDir(m.device, m.dir))
	if err != nil {
		return nil, rpcError(describe("statistics of volume", r.GetVolumeId()), err)
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: usageOf(&st)}, nil
}

// NodeGetVolumeHealth reports a volume as inaccessible if its mount does not reply, or fails. It
// finds the mount by a path of the request, and otherwise by the volume ID.
func (d *Driver) NodeGetVolumeHealth(ctx context.Context,
	r *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	if err := checkGiven("volume ID", r.GetVolumeId()); err != nil {
		return nil, err
	}
	dir, err := d.healthDir(ctx, r)
	if err != nil {
		return nil, err
	}
	health := &csi.VolumeHealth{VolumeId: r.GetVolumeId()}
	if dir != "" {
		if reason, message := d.condition(ctx, dir); reason != "" {
			health.HealthStatuses = []*csi.VolumeHealth_VolumeHealthEntry{
				{Status: csi.VolumeHealthErrorType_INACCESSIBLE, Reason: reason, Message: message}}
		}
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: health}, nil
}

// healthDir returns the staging path of a volume, or "" if the volume is not mounted.
func (d *Driver) healthDir(ctx context.Context, r *csi.NodeGetVolumeHealthRequest) (string, error) {
	for _, path := range []string{r.GetStagingTargetPath(), r.GetVolumePublishPath()} {
		if path == "" {
			continue
		}
		m, err := publishedAt(ctx, r.GetVolumeId(), path)
		switch {
		case status.Code(err) == codes.NotFound:
			continue
		case err != nil:
			return "", err
		}
		return probeDir(m.device, m.dir), nil
	}
	v, err := parseID(r.GetVolumeId())
	if err != nil { // of a volume that a user has written: only a path tells where it is
		return "", nil
	}
	l, err := d.client.List(ctx)
	if err != nil {
		return "", rpcError(describe("health of volume", r.GetVolumeId()), err)
	}
	for i := range l {
		if l[i].Spec == v.spec().String() {
			return l[i].Dir, nil
		}
	}
	return "", nil
}

// NodeExpandVolume has nothing to do, because NFS has no size of a directory.
func (d *Driver) NodeExpandVolume(ctx context.Context,
	r *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	if _, err := publishedAt(ctx, r.GetVolumeId(), r.GetVolumePath()); err != nil {
		return nil, err
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: capacity(r.GetCapacityRange())}, nil
}
