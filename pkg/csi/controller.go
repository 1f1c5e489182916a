package csi

import (
	"context"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// secretMountOptions is the key of a secret of external-provisioner with mount options.
// DeleteVolume and ValidateVolumeCapabilities get no other options. csi-driver-nfs has the same
// key.
const secretMountOptions = "mountoptions"

// ControllerGetCapabilities returns the calls of the service.
func (d *Driver) ControllerGetCapabilities(context.Context,
	*csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	r := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		r.Capabilities = append(r.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}}})
	}
	return r, nil
}

// CreateVolume creates the directory of a volume. A directory that exists is the volume: the names
// that Kubernetes gives to volumes are unique. NFS has no size of a directory, so the capacity of
// the reply is 0, which means unknown.
func (d *Driver) CreateVolume(ctx context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := checkGiven("volume name", r.GetName()); err != nil {
		return nil, err
	}
	if err := checkCapabilities(r.GetVolumeCapabilities()); err != nil {
		return nil, err
	}
	if err := checkCapacity(r.GetCapacityRange()); err != nil {
		return nil, err
	}
	switch {
	case r.GetVolumeContentSource() != nil:
		return nil, invalid("volume %s: clones and snapshots are not supported", brief(r.GetName()))
	case len(r.GetMutableParameters()) > 0:
		return nil, invalid("volume %s: mutable parameters are not supported", brief(r.GetName()))
	}
	v, err := newVolume(r.GetName(), r.GetParameters())
	if err != nil {
		return nil, invalid("volume %s: %v", brief(r.GetName()), err)
	}
	release, err := d.lock(v.id())
	if err != nil {
		return nil, err
	}
	defer release()
	options := joinOptions(flagsOf(r.GetVolumeCapabilities()[0]), v.options)
	if err := d.withShare(ctx, v, options, func(root int) error { return createDir(root, v) }); err != nil {
		return nil, rpcError(describe("create volume", v.id()), err)
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: v.id(), VolumeContext: v.context()}}, nil
}

// DeleteVolume removes, keeps or renames the directory of a volume. An ID that this driver has not
// written names no volume, so there is nothing to delete.
func (d *Driver) DeleteVolume(ctx context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	release, err := d.lock(r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer release()
	v, err := parseID(r.GetVolumeId())
	if err != nil {
		d.log.Warn("delete of an unknown volume ignored", "error", err)
		return &csi.DeleteVolumeResponse{}, nil
	}
	remove := removeDir
	switch v.onDelete {
	case onDeleteRetain:
		return &csi.DeleteVolumeResponse{}, nil
	case onDeleteArchive:
		remove = archiveDir
	}
	err = d.withShare(ctx, v, secretOptions(r.GetSecrets()), func(root int) error { return remove(root, v) })
	if err != nil {
		return nil, rpcError(describe("delete volume", v.id()), err)
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// secretOptions returns the mount options of a secret.
func secretOptions(secrets map[string]string) string {
	for k, v := range secrets {
		if strings.EqualFold(k, secretMountOptions) {
			return v
		}
	}
	return ""
}

// ValidateVolumeCapabilities confirms all access modes of a volume that exists.
func (d *Driver) ValidateVolumeCapabilities(ctx context.Context,
	r *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	release, err := d.lock(r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer release()
	if len(r.GetVolumeCapabilities()) == 0 {
		return nil, invalid("missing volume capabilities")
	}
	v, err := parseID(r.GetVolumeId())
	if err != nil {
		return nil, status.Error(codes.NotFound, err.Error())
	}
	found := false
	options := joinOptions(secretOptions(r.GetSecrets()), flagsOf(r.GetVolumeCapabilities()[0]))
	err = d.withShare(ctx, v, options, func(root int) (err error) {
		found, err = existsDir(root, v)
		return err
	})
	switch {
	case err != nil:
		return nil, rpcError(describe("check volume", v.id()), err)
	case !found:
		return nil, status.Errorf(codes.NotFound, "volume %s: its directory does not exist", v.id())
	}
	if err := checkCapabilities(r.GetVolumeCapabilities()); err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: status.Convert(err).Message()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{
		Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{VolumeContext: r.GetVolumeContext(),
			VolumeCapabilities: r.GetVolumeCapabilities(), Parameters: r.GetParameters()}}, nil
}

// ControllerExpandVolume accepts every size, because NFS has no size of a directory.
func (d *Driver) ControllerExpandVolume(_ context.Context,
	r *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	release, err := d.lock(r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer release()
	if r.GetCapacityRange() == nil {
		return nil, invalid("missing capacity range")
	}
	if err := checkCapacity(r.GetCapacityRange()); err != nil {
		return nil, err
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: capacity(r.GetCapacityRange())}, nil
}

// checkCapacity refuses a range that no size is in.
func checkCapacity(r *csi.CapacityRange) error {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	if required < 0 || limit < 0 || limit > 0 && limit < required {
		return invalid("capacity range: required %d bytes, limit %d bytes", required, limit)
	}
	return nil
}

// capacity returns a size in r.
func capacity(r *csi.CapacityRange) int64 {
	if r.GetRequiredBytes() == 0 {
		return r.GetLimitBytes()
	}
	return r.GetRequiredBytes()
}
