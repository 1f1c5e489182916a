// Package csi is the CSI driver for Kubernetes: the services Identity, Controller and Node of the
// Container Storage Interface, version 1.
//
//	driver.go      configuration, gRPC server, logging of calls
//	identity.go    service Identity
//	controller.go  service Controller: create and delete volumes
//	node.go        service Node: stage, publish and their opposites
//	health.go      statistics and health of a volume, in bounded time
//	volume.go      volume IDs, parameters of storage classes, mount options
//	share.go       private mounts of the controller, and directories in them
//	mounts.go      the mount table of this mount namespace, bind mounts
//	locks.go       one call at a time for each volume
//	errors.go      gRPC codes of errors
//
// A volume is a directory of an NFS export. The ID of a provisioned volume contains its server,
// export and directory, so that the controller keeps no state. The names of the parameters are
// those of csi-driver-nfs.
//
// # Promises
//
// The driver owns no mount. The daemon mounts each volume at its staging path, and the driver bind
// mounts the staging path at the target paths. The state is in the daemon and in the mount table,
// so a driver that starts again continues. Each call can be repeated.
//
// A server that does not reply delays no call beyond its deadline. A call that accesses a volume
// runs in a goroutine; see [prober] and [Driver.withShare] for the bounds.
//
// Names of a request never lead out of the export. The driver refuses "..", empty elements, and
// symbolic links between the export and the directory of a volume.
//
// # Locks
//
// The lock of [volumeLocks] guards the set of volumes with a call in progress. The lock of [prober]
// guards the set of probes in progress. No goroutine holds either during a system call or a call of
// the daemon.
package csi
